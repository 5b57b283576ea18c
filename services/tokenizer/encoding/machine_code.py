"""Machine code of a kernel: its file, its place in memory, and its call, all without numba.

Numba takes half a second to be imported and to find its own compiled code again, and llvmlite takes 40 ms to link what
numba has compiled. So numba is imported only where nothing is compiled yet.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numpy as np


@dataclass(frozen=True)
class MachineCode:
    """A compiled function that gets arrays and 64-bit integers, and returns a 64-bit integer."""

    symbol: str
    """Name of the function in the object file."""
    arguments: tuple[str, ...]
    """Types of the arguments, with the fields of tuples one by one: `uint8[]` for an array, `int64` for an integer."""
    object_file: bytes

    def pack(self, file_name: str) -> bytes:
        """Return the content of the file of this name: a line of JSON with a checksum, and the object file.

        The checksum covers the file's name, which says for which processor the code is. So a file that was given the
        name of another one counts as damaged.
        """
        header = {"symbol": self.symbol, "arguments": self.arguments}
        checksum = _checksum(file_name, json.dumps(header), self.object_file)
        return json.dumps({**header, "sha256": checksum}).encode() + b"\n" + self.object_file

    @classmethod
    def unpack(cls, content: bytes, file_name: str) -> MachineCode | None:
        """Return the code in the content of the file of this name, or None where it is damaged or of another name."""
        line, _, object_file = content.partition(b"\n")
        try:
            header = json.loads(line)
            checksum = header.pop("sha256")
            if checksum != _checksum(file_name, json.dumps(header), object_file):
                return None
            return cls(header["symbol"], tuple(header["arguments"]), object_file)
        except (ValueError, KeyError, AttributeError, TypeError):
            return None


class Kernel:
    """Machine code that is linked into this process. A call releases Python's lock."""

    def __init__(self, code: MachineCode) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # owns the linked code
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code.object_file))
        self._engine.finalize_object()
        self._arguments = code.arguments
        words = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint64] * sum(map(_num_words, code.arguments))]
        self._function = ctypes.CFUNCTYPE(ctypes.c_int32, *words)(self._engine.get_function_address(code.symbol))

    def __call__(self, *values: Any) -> int:
        """Call the function. Arrays in tuples, and tuples in tuples, are passed one by one."""
        flat = flatten(values)
        if argument_types(flat) != self._arguments:
            raise TypeError(f"the kernel takes {', '.join(self._arguments)}, got {', '.join(argument_types(flat))}")
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        words = [word for value in flat for word in _words(value)]
        if self._function(ctypes.addressof(result), ctypes.addressof(error), *words):
            raise RuntimeError("the kernel raised an error, and kernels raise none")
        return result.value


def flatten(values: Sequence[Any]) -> list[Any]:
    """Return the values with the items of tuples, also of tuples in tuples, in their place."""
    flat: list[Any] = []
    for value in values:
        flat.extend(flatten(value) if isinstance(value, tuple) else [value])
    return flat


def argument_types(flat: Sequence[Any]) -> tuple[str, ...]:
    """Return the types of values as `MachineCode.arguments` names them."""
    return tuple(
        f"{value.dtype.name}[]" if isinstance(value, np.ndarray) else np.asarray(value).dtype.name for value in flat
    )


def _num_words(argument: str) -> int:
    return 7 if argument.endswith("[]") else 1


def _words(value: Any) -> list[int]:
    """Return the 64-bit words in which numba passes a value.

    For an array they are two pointers of numba's own, the number and the size of its items, the address of the first
    one, the length, and the distance of two items.
    """
    if not isinstance(value, np.ndarray):
        return [int(value)]
    if not value.flags.c_contiguous or value.ndim != 1:
        raise ValueError(f"the kernel takes contiguous arrays, got one of shape {value.shape}, strides {value.strides}")
    return [0, 0, value.size, value.itemsize, value.ctypes.data, value.size, value.itemsize]


def _checksum(file_name: str, header: str, object_file: bytes) -> str:
    return hashlib.sha256(f"{file_name}\n{header}\n".encode() + object_file).hexdigest()
