"""Loads and stores of eight bytes at any index of an array, and prefetches, which numba has no operations for.

Bounds are not checked: the caller must make sure that the array holds eight bytes from `index` on.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_BYTE = ir.IntType(8)
_READ_INTO_ALL_CACHES = 0, 3, 1
"""Arguments of `llvm.prefetch`: for reading, into all levels of the cache, and data instead of instructions."""


@intrinsic
def load_word(typing_context: Any, array: Any, index: Any) -> Any:
    """Return the eight bytes that begin at item `index`, as uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, signature, arguments), align=1)

    return types.uint64(array, types.intp), generate


@intrinsic
def store_word(typing_context: Any, array: Any, index: Any, word: Any) -> Any:
    """Overwrite the eight bytes that begin at item `index` with `word`."""

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
        function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        address = builder.bitcast(_address(context, builder, signature, arguments), pointer)
        builder.call(function, [address, *(number(flag) for flag in _READ_INTO_ALL_CACHES)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array_type = signature.args[0]
    array = context.make_array(array_type)(context, builder, arguments[0])
    item_bytes = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    offset = builder.mul(arguments[1], ir.Constant(arguments[1].type, item_bytes))
    begin = builder.bitcast(array.data, _BYTE.as_pointer())
    return builder.bitcast(builder.gep(begin, [offset]), _WORD.as_pointer())
