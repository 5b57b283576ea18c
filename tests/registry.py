"""Runs a registry on loopback: Debian's docker-registry."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.common.testing.waiting import wait_until
from tests.containers import docker

PROGRAM = "docker-registry"


@contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Run a registry with its storage in `folder`, and yield its address; Docker's tags for it are removed at the end.

    Skips the test where docker-registry is not installed.
    """
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"no {PROGRAM} on PATH: apt-get install {PROGRAM}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    settings = folder / "registry.yml"
    storage = {"filesystem": {"rootdirectory": str(folder / "registry")}}
    settings.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": address}}), encoding="utf-8")
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(settings)], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: _answers(address), 60)
        yield address
    finally:
        process.terminate()
        process.wait(30)
        names = docker("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()
        for name in names:
            if name.startswith(f"{address}/"):
                docker("rmi", "--no-prune", name)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
