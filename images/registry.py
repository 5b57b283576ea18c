"""Reads the digest of an image from its registry, by skopeo, which uses the logins of `docker login`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from services.common.errors import DeviceError

TIMEOUT = "60s"
# Answers where a registry has no such tag or repository: words of the OCI Distribution Specification, and Harbor's.
NOT_HELD = ("manifest unknown", "name unknown", "NOT_FOUND", "404 Not Found", "StatusCode: 404")


class NotHeld(DeviceError):
    """The registry answered that it has no such image."""


def resolve_digest(image: str) -> str:
    """The digest of `image` (`[registry/]name:tag`). Raises `DeviceError` when its registry does not give it."""
    return str(_inspect(image)["Digest"])


def is_held(image: str) -> bool:
    """Return whether the registry has an image of this name. Raises `DeviceError` when the registry does not answer."""
    try:
        _inspect(image)
    except NotHeld:
        return False
    return True


def repository_of(image: str) -> str:
    """An image's name without its tag and digest. A port, which is before the first slash, stays."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]


def _inspect(image: str) -> dict[str, Any]:
    is_local = image.partition("/")[0].partition(":")[0] in ("localhost", "127.0.0.1")
    command = ["skopeo", "--command-timeout", TIMEOUT, "--override-os", "linux", "--override-arch", "amd64"]
    command += ["inspect", "--no-tags", *(["--tls-verify=false"] if is_local else []), f"docker://{image}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DeviceError(
            f"skopeo, which looks {image} up in its registry, is not on PATH. ./prerequisites.sh kubernetes "
            f"names the command that installs it"
        ) from error
    if done.returncode != 0:
        error_type = NotHeld if any(answer in done.stderr for answer in NOT_HELD) else DeviceError
        raise error_type(
            f"{image} could not be looked up in its registry: {done.stderr.strip()}\nCheck the name and the tag, and "
            f"run this on a machine that reaches the registry, after `docker login`."
        )
    return dict(json.loads(done.stdout))
