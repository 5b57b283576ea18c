"""How fast this machine multiplies matrices: the ceiling that a step's model FLOPs are held against."""

from __future__ import annotations

import time

import torch

from services.common.errors import DeviceError

SIZE = 1024
"""Rows and columns of matrices on a CPU: large enough for full speed, small enough for caches."""
GPU_SIZE = 8192
"""Rows and columns of matrices on a GPU: a product takes milliseconds, so that starting it counts for nothing."""


def measure_gemm_peak(dtype: str, threads: int, seconds: float = 0.5, device: str = "cpu") -> float:
    """FLOP/s of the fastest product of two square matrices of `dtype`, tried for `seconds`.

    On the CPU with `threads`; on a GPU, such as "cuda:0", they do not matter. Raises `DeviceError` where a GPU cannot
    multiply them, for example because other processes hold its memory.
    """
    return _measure_cpu(dtype, threads, seconds) if device == "cpu" else _measure_gpu(dtype, seconds, device)


def _measure_cpu(dtype: str, threads: int, seconds: float) -> float:
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


def _measure_gpu(dtype: str, seconds: float, device: str) -> float:
    try:
        # Random numbers: equal ones switch fewer transistors, so a GPU at its power limit multiplies them faster than
        # a model's (https://www.thonking.ai/p/strangely-matrix-multiplications).
        left, right = (torch.randn(GPU_SIZE, GPU_SIZE, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        product = left @ right
        torch.cuda.synchronize(device)
        fastest, end = float("inf"), time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            torch.mm(left, right, out=product)
            torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - began)
    except RuntimeError as error:  # torch's own errors of a device, and of its memory
        raise DeviceError(f"{device} multiplies no matrices: {error}") from error
    return 2.0 * GPU_SIZE**3 / fastest
