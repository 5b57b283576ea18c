"""How numba compiles the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.tokenizer.encoding.compiled_kernels import choose_kernel_folder

choose_kernel_folder()  # numba looks for what it has compiled when a function is decorated

from numba import njit  # noqa: E402

# Numba counts a reference to every array of a tuple at every call, atomically: 11 MB/s instead of 320. So nothing here
# allocates (`_nrt`). A call passes a tuple array by array, so what every chunk needs is inlined; what only unseen
# chunks need is not, because it would take twice as long to compile.
Decorator = Callable[[Any], Any]
kernel: Decorator = njit(nogil=True, cache=True, _nrt=False)  # type: ignore[call-overload]
_INNER: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Decorator = njit(**_INNER)
inlined: Decorator = njit(forceinline=True, **_INNER)
