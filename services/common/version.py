"""Which version of the services this is: that of an image, of a checkout, or of an installed package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[2]


def read_version(service: str) -> str:
    return (_SOURCE / "services" / service / "VERSION").read_text(encoding="utf-8").strip()


def read_commit() -> str:
    """The commit that the code is from; `unknown` outside of an image and a checkout."""
    if commit := os.environ.get("MILLRACE_GIT_SHA"):
        return commit
    if not (_SOURCE / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(_SOURCE), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_version(service: str = "") -> str:
    """The version of a service, or of all that are here, with the commit and the image that they are from."""
    services = [service] if service else sorted(path.parent.name for path in _SOURCE.glob("services/*/VERSION"))
    versions = ", ".join(f"{each} {read_version(each)}" for each in services)
    return f"{versions}; commit {read_commit()}, image {os.environ.get('MILLRACE_IMAGE', 'none')}"
