"""Prints a lock without torch, Triton and the CUDA libraries: `python3 without_cuda.py LOCK`.

An environment whose torch comes from an index of CPU builds gets its other packages from this. Only torch needs Triton
and the CUDA libraries; torch's other dependencies stay in the lock.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ENTRY = re.compile(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9]|\Z)", flags=re.MULTILINE | re.DOTALL)
TORCH_AND_CUDA = re.compile(r"(torch|triton|nvidia-[^=]*|cuda-[^=]*)==")


def without_cuda(lock: str) -> str:
    """The text of the lock without its entries for torch, Triton and CUDA."""
    return "".join(entry for entry in _ENTRY.findall(lock) if not TORCH_AND_CUDA.match(entry))


if __name__ == "__main__":
    sys.stdout.write(without_cuda(Path(sys.argv[1]).read_text(encoding="utf-8")))
