"""Compiles the kernels with numba, keeps their machine code, and adds instructions that numba has no operations for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.caching import InTreeCacheLocator, UserWideCacheLocator
from numba.extending import intrinsic

# Numba counts references to every array of a tuple at every call, with atomic instructions: the kernels run at 11 MB/s
# with these counts and at 320 MB/s without. So the counts are off (`_nrt`), and kernels allocate nothing. A call passes
# the arrays of a tuple one by one, so functions that run for every chunk are inlined. Those that run for unseen chunks
# alone are not, because compilation would take twice as long.
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "no_cfunc_wrapper": True}
_WITHOUT_PYTHON: dict[str, Any] = {"no_cpython_wrapper": True}

_WORD = ir.IntType(64)
_BYTE = ir.IntType(8)
_READ_INTO_ALL_CACHES = 0, 3, 1
"""Arguments of `llvm.prefetch`: for reading, into all levels of the cache, and data instead of instructions."""


class KernelCache(InTreeCacheLocator):
    """Keeps machine code in `__pycache__`, or in the user's cache where that folder is read-only and not of an image.

    An image names the processor that its code is for. A checkout of somebody else may have the code of another one.
    Any change of this folder's modules makes code outdated: numba's own locators look at the kernel's module alone.
    """

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)  # type: ignore[no-untyped-call]
        folder = Path(self._cache_path)
        is_shipped = config.CPU_NAME and any(folder.glob("*.nbi"))  # type: ignore[attr-defined]
        if not os.access(folder.parent, os.W_OK) and not is_shipped:
            self._cache_path = UserWideCacheLocator(function, file).get_cache_path()

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> KernelCache:
        return cls(function, file)

    def get_source_stamp(self) -> str:
        sources = sorted(Path(self._py_file).parent.glob("*.py"))
        return hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, at its first call with arguments of some types, and keep the result."""
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelCache.__name__}"  # type: ignore[attr-defined]
    return njit(cache=True, **_OPTIONS)(function)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return njit(**_OPTIONS, **_WITHOUT_PYTHON)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into every function that calls it."""
    return njit(forceinline=True, **_OPTIONS, **_WITHOUT_PYTHON)(function)


@intrinsic
def load_word(typing_context: Any, array: Any, index: Any) -> Any:
    """Return the eight bytes that begin at item `index`, as uint64, without a check of bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, signature, arguments), align=1)

    return types.uint64(array, types.intp), generate


@intrinsic
def store_word(typing_context: Any, array: Any, index: Any, word: Any) -> Any:
    """Overwrite the eight bytes that begin at item `index` with `word`, without a check of bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _address(context, builder, signature, arguments), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask the processor to load item `index` of the array into its caches, and do not wait for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = _BYTE.as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        name = "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        address = builder.bitcast(_address(context, builder, signature, arguments), pointer)
        builder.call(function, [address, *(number(flag) for flag in _READ_INTO_ALL_CACHES)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def find_bytes(typing_context: Any, array: Any, index: Any, lowest: Any, highest: Any) -> Any:
    """Return a bit for each of the 64 bytes from item `index` on, which is 1 for bytes from `lowest` to `highest`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_BYTE, 64)
        address = _address(context, builder, signature, arguments)
        loaded = builder.load(builder.bitcast(address, vector.as_pointer()), align=1)
        none, places = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
        limits = (builder.trunc(limit, _BYTE) for limit in arguments[2:])
        alone = (builder.insert_element(none, limit, ir.IntType(32)(0)) for limit in limits)
        first, last = (builder.shuffle_vector(each, none, places) for each in alone)
        is_found = builder.icmp_unsigned("<=", builder.sub(loaded, first), builder.sub(last, first))
        return builder.bitcast(is_found, _WORD)

    return types.uint64(array, types.intp, types.intp, types.intp), generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array_type = signature.args[0]
    array = context.make_array(array_type)(context, builder, arguments[0])
    item_bytes = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    offset = builder.mul(arguments[1], ir.Constant(arguments[1].type, item_bytes))
    begin = builder.bitcast(array.data, _BYTE.as_pointer())
    return builder.bitcast(builder.gep(begin, [offset]), _WORD.as_pointer())
