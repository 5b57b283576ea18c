"""Numba's compiler options for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.tokenizer.encoding.compiled_kernels import choose_kernel_folder

choose_kernel_folder()  # before the import: numba looks for compiled code while it decorates a function

from numba import njit  # noqa: E402

# Numba counts references to every array of a tuple at every call, with atomic instructions: the kernels run at 11 MB/s
# with these counts and at 320 MB/s without. So the counts are off (`_nrt`), and kernels allocate nothing. A call passes
# the arrays of a tuple one by one. So functions that run for every chunk are inlined. Functions that run for unseen
# chunks alone are not inlined, because compilation would take twice as long.
Decorator = Callable[[Any], Any]
kernel: Decorator = njit(nogil=True, cache=True, _nrt=False)  # type: ignore[call-overload]
_INNER: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Decorator = njit(**_INNER)
inlined: Decorator = njit(forceinline=True, **_INNER)
