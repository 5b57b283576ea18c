"""Arrow arrays from numbers and text, and back.

`pyarrow.array` and `Array.to_numpy` do the same, and first import pandas, which takes 0.25 s of every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def array_of_numbers(values: npt.NDArray[Any]) -> pa.Array:
    """Return the array of these numbers. Nothing is copied."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return the values of an array of numbers without nulls. Nothing is copied."""
    values: npt.NDArray[Any] = np.from_dlpack(array)
    return values


def array_of_text(values: Sequence[str], value_type: pa.DataType) -> pa.Array:
    """Return the array of these strings, of less than 2 GiB in all: `pa.string()`, or `pa.binary()` for paths."""
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int32, len(encoded) + 1)
    return pa.Array.from_buffers(
        value_type, len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )
