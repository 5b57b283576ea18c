"""Maps the arrays that tasks of this command have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def map_array(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the content of a file as an array, of which the pages that are used are read; a file may be empty."""
    # Linux maps no empty file.
    return np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
