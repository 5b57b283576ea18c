"""Reads RAY_ADDRESS: whether a command joins a Ray cluster, at which address, and which launcher follows from that."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from urllib.parse import urlsplit

from services.common.errors import RecipeError

AUTO = "auto"
"""Value of RAY_ADDRESS for the cluster that has a node on this machine."""


def cluster_address() -> str | None:
    """HOST:PORT of the Ray cluster to join, or AUTO; None where RAY_ADDRESS is not set, or empty.

    Raises `RecipeError` for a RAY_ADDRESS that is not an address.
    """
    given = os.environ.get("RAY_ADDRESS", "").strip()
    if given and given != AUTO and split_address(given) is None:
        raise RecipeError(
            f"RAY_ADDRESS={given!r} is not the address of a Ray cluster: expected HOST:PORT, such as 10.0.0.1:6379, or "
            f"auto for the cluster on this machine. Correct it, or unset RAY_ADDRESS: the command then uses this "
            f"machine alone."
        )
    return given or None


def default_launcher() -> str:
    """Name of the launcher of a command without `--launch`: `ray` where RAY_ADDRESS names a cluster, else `inline`.

    Raises `RecipeError` for a RAY_ADDRESS that is not an address.
    """
    return "ray" if cluster_address() else "inline"


def choose_interface() -> None:
    """Let Ray listen on loopback alone where it does not join a cluster. Ray reads this once, when it is imported."""
    if not os.environ.get("RAY_ADDRESS", "").strip():
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT or [IPV6]:PORT; None for anything else."""
    with suppress(ValueError):  # a port that is none
        place = urlsplit(f"//{address}")
        if place.netloc == address and place.hostname and place.port and not re.search(r"[@\s]", address):
            return place.hostname, place.port
    return None
