"""Is a Ray cluster joined, and at which address? Without RAY_ADDRESS Ray is started on this machine alone."""

from __future__ import annotations

import os

from services.common.errors import RecipeError

AUTO = "auto"
"""The cluster that has a node on this machine."""


def cluster_address() -> str | None:
    """HOST:PORT of the cluster to join, or AUTO; None where Ray is started in place, as with an empty RAY_ADDRESS.

    Raises `RecipeError` when RAY_ADDRESS is no address.
    """
    given = os.environ.get("RAY_ADDRESS", "").strip()
    if given and given != AUTO and split_address(given) is None:
        raise RecipeError(
            f"RAY_ADDRESS={given!r} is no address of a Ray cluster: expected HOST:PORT, such as 10.0.0.1:6379, or auto "
            f"for the one on this machine. Correct it, or unset RAY_ADDRESS: Ray is then started on this machine alone."
        )
    return given or None


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT or [IPV6]:PORT; None for anything else."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65_536:
        return None
    if any(character in host for character in "/@?# \0") or not host:
        return None
    try:
        host.encode("idna")  # as looking it up does
    except UnicodeError:
        return None
    return host, int(port)
