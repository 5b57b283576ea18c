"""How fast this machine multiplies matrices: the ceiling that a step's model FLOPs are held against."""

from __future__ import annotations

import time

import torch

SIZE = 1024
"""Of square matrices: large enough for full speed, small enough for caches."""


def measure_gemm_peak(dtype: str, threads: int, seconds: float = 0.5) -> float:
    """FLOP/s of the fastest product of two SIZE x SIZE matrices of `dtype`, tried for `seconds` with `threads`."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = (torch.ones(SIZE, SIZE, dtype=getattr(torch, dtype)) for _ in range(2))
        product = left @ right
        fastest, end = float("inf"), time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            torch.mm(left, right, out=product)
            fastest = min(fastest, time.perf_counter() - began)
        return 2.0 * SIZE**3 / fastest
    finally:
        torch.set_num_threads(threads_before)
