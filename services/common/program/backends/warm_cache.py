"""The error of a program that may not compile and lacks a graph, whichever compiler its device has."""

from __future__ import annotations

from services.common.errors import DeviceError


def missing_graph() -> DeviceError:
    """Return the error for a graph that the compile cache does not hold although `compile.require_warm` is set."""
    return DeviceError(
        "compile.require_warm is set, and the compile cache lacks a graph, because it was made for another step. Run "
        "the compiler stage again, or set --compile.require_warm=false to compile here."
    )
