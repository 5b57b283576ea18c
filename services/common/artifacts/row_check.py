"""Computes the checks by which a reader of a corpus finds a row that is damaged or in the wrong place.

The check of a row is the xxh3-64 of its ids as they are stored, in little-endian bytes, followed by its document starts
as little-endian int32. Its seed is the number of the row in its split, plus 2**63 in the validation split, so that a
whole row in another row's place is damage, too. The tail is the row that follows the last full one.

A check costs 0.7 us for a row of 8 kB and 1.1 us for one of 16 kB on a core.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.corpus import Split

_FIRST_SEED: dict[Split, int] = {"train": 0, "validation": 2**63}


def check_row(split: Split, row: int, ids: npt.NDArray[np.integer[Any]], doc_starts: npt.NDArray[np.int32]) -> int:
    """Return the check of the row with this number in its split."""
    hasher = xxhash.xxh3_64(ids.data, seed=_FIRST_SEED[split] + row)
    hasher.update(doc_starts.data)
    return hasher.intdigest()


def check_rows(
    split: Split,
    first_row: int,
    ids_RL: npt.NDArray[np.integer[Any]],
    start_offsets: npt.NDArray[np.int32],
    doc_starts: npt.NDArray[np.int32],
) -> npt.NDArray[np.uint64]:
    """Return the checks of consecutive rows, of which the first one has the number `first_row`.

    The document starts of row r of these are `doc_starts[start_offsets[r] : start_offsets[r + 1]]`.
    """
    borders = start_offsets.tolist()
    return np.fromiter(
        (
            check_row(split, first_row + row, ids_L, doc_starts[borders[row] : borders[row + 1]])
            for row, ids_L in enumerate(ids_RL)
        ),
        np.uint64,
        len(ids_RL),
    )


def digest_checks(checks: npt.NDArray[np.uint64]) -> str:
    """Return the xxh3-128 of the checks of a file's rows, which the manifest has for each shard and tail."""
    return xxhash.xxh3_128_hexdigest(checks.data)
