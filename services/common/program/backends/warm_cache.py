"""The error of a program that may not compile and lacks graphs, whichever compiler its device has."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import DeviceError


def missing_graphs(names: Sequence[str]) -> DeviceError:
    """Return the error for graphs that the compile cache does not hold although `compile.require_warm` is set."""
    named = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
    return DeviceError(
        f"compile.require_warm is set, and the compile cache does not hold {named} ({len(names)} in all), because it "
        f"was made for another step. Run the compiler stage again, or set --compile.require_warm=false to compile here."
    )


def name_of(function: object) -> str:
    """Return the name of a function in an error; that of a partial function is its call."""
    return str(getattr(function, "__qualname__", function))
