"""Runs Ray on a node of a batch job, `ray start --block`, as a child process in a session of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from services.common.launch.launcher import STAGE_RESOURCE_PREFIX

HEAD_PORT = 6379
NODE_LABEL = "batch-node"
"""Label of a Ray node; its value is the node's index in the Batch job."""

# All ports are below 32768, where the kernel's ephemeral ports begin: no outgoing connection can take one of them, and
# they need not be reserved with a sysctl, which a container may not set.
PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "dashboard-agent-listen-port": 6384,
    "metrics-export-port": 8080,
    "min-worker-port": 10_002,
    "max-worker-port": 19_999,
}
OBJECT_STORE_BYTES = 128 * 2**20  # only small results of tasks are in Ray's object store


def ray_resources(stage: str, cpus: int | None, neuron_cores: int) -> list[str]:
    """Options of `ray start` for a node's resources, as a worker group on Kubernetes declares them."""
    resources = {f"{STAGE_RESOURCE_PREFIX}{stage}": 1.0}
    if neuron_cores:  # given, because Ray's own search runs a tool that some images lack
        resources["neuron_cores"] = float(neuron_cores)
    counted = [f"--num-cpus={cpus}"] if cpus else []
    return [*counted, f"--resources={json.dumps(resources)}"]


@contextmanager
def running_ray(options: Sequence[str], address: str, head: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run Ray on this node at `address`, as the head or joined to `head` (HOST:PORT), and yield its process.

    A SIGTERM to that process drains the node: Ray notifies the drivers, waits until nothing runs on the node, for at
    most RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, and ends. All of Ray's processes end with the block.
    """
    role = [f"--address={head}"] if head else ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        *(f"--{name}={port}" for name, port in PORTS.items()),
        *(f"--node-ip-address={address}", f"--object-store-memory={OBJECT_STORE_BYTES}", *options),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # Ray prints advice for a person at a terminal
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
