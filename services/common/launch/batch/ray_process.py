"""Ray on a node of a batch job, as a child process in a session of its own: `ray start --block`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.common.launch.guard import end_guard, start_guard
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX

HEAD_PORT = 6379
NODE_LABEL = "batch-node"
"""A Ray node's label, with the index that Batch gave to the node."""

# All below 32768, where the kernel's own choice begins: no connection that goes out is given one of them, and nobody
# has to reserve them by a sysctl, which a container may not set.
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
OBJECT_STORE_BYTES = 128 * 2**20  # only small results travel through it


def ray_resources(stage: str, cpus: int | None, neuron_cores: int) -> list[str]:
    """Options for what a node has, as a worker group on Kubernetes declares it."""
    resources = {f"{STAGE_RESOURCE_PREFIX}{stage}": 1.0}
    if neuron_cores:  # Ray's own search runs a tool that not every image has
        resources["neuron_cores"] = float(neuron_cores)
    counted = [f"--num-cpus={cpus}"] if cpus else []
    return [*counted, f"--resources={json.dumps(resources)}"]


@contextmanager
def running_ray(options: Sequence[str], address: str, head: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes on this node, at `address`: the head, or joined to `head` (HOST:PORT).

    A SIGTERM to the process that is yielded drains the node: Ray tells the drivers that it is to leave, waits until
    nothing runs there, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S at most, and ends. All of it ends with the block, and with
    this process.
    """
    role = [f"--address={head}"] if head else ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        *(f"--{name}={port}" for name, port in PORTS.items()),
        *(f"--node-ip-address={address}", f"--object-store-memory={OBJECT_STORE_BYTES}", *options),
    ]
    guard = start_guard()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # advice for a person at a terminal
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    )
    try:
        guard.watch_session(process.pid)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        end_guard()
