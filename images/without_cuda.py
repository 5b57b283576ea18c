"""Print a lock without torch and what only its CUDA build brings along: `python3 without_cuda.py LOCK`.

For a torch that comes from elsewhere, such as an index of CPU builds: triton and the CUDA libraries are needed by
torch alone, and what else torch needs stays in the lock.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ENTRY = re.compile(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9]|\Z)", flags=re.MULTILINE | re.DOTALL)
TORCH_AND_CUDA = re.compile(r"(torch|triton|nvidia-[^=]*|cuda-[^=]*)==")


def without_cuda(lock: str) -> str:
    """The lock's text, its entries for torch and CUDA left out."""
    return "".join(entry for entry in _ENTRY.findall(lock) if not TORCH_AND_CUDA.match(entry))


if __name__ == "__main__":
    sys.stdout.write(without_cuda(Path(sys.argv[1]).read_text(encoding="utf-8")))
