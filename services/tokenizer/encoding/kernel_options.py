"""Numba's compiler options for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

# Numba counts references to every array of a tuple at every call, with atomic instructions: the kernels run at 11 MB/s
# with these counts and at 320 MB/s without. So the counts are off (`_nrt`), and kernels allocate nothing. A call passes
# the arrays of a tuple one by one. So functions that run for every chunk are inlined. Functions that run for unseen
# chunks alone are not inlined, because compilation would take twice as long. No function gets a wrapper for Python:
# `machine_code` calls the kernels in a process that has not imported numba.
Decorator = Callable[[Any], Any]
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Decorator = njit(**_OPTIONS)
inlined: Decorator = njit(forceinline=True, **_OPTIONS)
