"""Runs docker commands, and raises errors that say what to do next."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

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
        raise DeviceError(
            f"the Docker engine does not answer: {answer.stderr.strip()}. Start it with `systemctl start docker` "
            f"(without systemd: `dockerd` as root), join the group `docker`, or set DOCKER_HOST."
        )


def has_image(name: str) -> bool:
    """Return whether this machine has an image of this name; False also where Docker is not installed."""
    return shutil.which("docker") is not None and _run("image", "inspect", name).returncode == 0


def inspect_image(name: str) -> dict[str, Any]:
    """Output of `docker image inspect` for one image. Raises `DeviceError` when it is not on this machine."""
    answer = _run("image", "inspect", name)
    if answer.returncode != 0:
        raise DeviceError(f"the image {name} is not on this machine: `make images` builds it.")
    return dict(json.loads(answer.stdout)[0])


def docker(*arguments: str, **options: Any) -> str:
    """Standard output of a docker command. Raises `DeviceError` with its message when it fails."""
    answer = _run(*arguments, **options)
    if answer.returncode != 0:
        raise DeviceError(f"docker {arguments[0]} failed: {answer.stderr.strip()}")
    return str(answer.stdout).strip()


def _run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, **options)
