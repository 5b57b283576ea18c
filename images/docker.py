"""Asks Docker's engine."""

from __future__ import annotations

import shutil
import subprocess

from services.common.errors import DeviceError


def require_engine() -> None:
    """Raises `DeviceError` when docker is not installed or its engine does not answer."""
    if shutil.which("docker") is None:
        raise DeviceError(
            "docker is not on PATH. Install Docker (Debian: apt-get install docker.io). "
            "`make demo` and `make test` do not need it."
        )
    answer = _run("version", "--format", "{{.Server.Version}}")
    if answer.returncode != 0:
        raise DeviceError(f"the Docker engine does not answer: {answer.stderr.strip()}")


def has_image(name: str) -> bool:
    """Return whether this machine has an image of this name; False also where Docker is not installed."""
    return shutil.which("docker") is not None and _run("image", "inspect", name).returncode == 0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
