"""Measures the speed of matrix products on this machine, with which the model FLOP/s of a step are compared."""

from __future__ import annotations

import time

import torch

from services.common.errors import DeviceError

SIZE = 1024
"""Rows and columns of matrices on a CPU: large enough for full speed, small enough for caches."""
SMALL_SIZE = 256
"""Rows and columns of matrices on a CPU that would take longer than LONGEST_SECONDS for a product of SIZE."""
LONGEST_SECONDS = 0.5
"""Seconds that a product on a CPU may take. One of SIZE takes 2.2 s in bfloat16 on an AMD EPYC without avx512_bf16."""
GPU_SIZE = 8192
"""Rows and columns of matrices on a GPU: a product takes milliseconds, so that its launch does not matter."""


def measure_gemm_peak(dtype: str, threads: int, seconds: float = 0.5, device: str = "cpu") -> float:
    """Return the FLOP/s of the fastest product of two square matrices of `dtype`, tried for `seconds`.

    `threads` apply to the CPU only, and not to a GPU such as "cuda:0". Raises `DeviceError` if a GPU cannot multiply
    the matrices, for example because other processes hold its memory.
    """
    return _measure_cpu(dtype, threads, seconds) if device == "cpu" else _measure_gpu(dtype, seconds, device)


def _measure_cpu(dtype: str, threads: int, seconds: float) -> float:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size, fastest = SMALL_SIZE, _time_product(SMALL_SIZE, dtype, seconds / 10)
        if fastest * (SIZE / SMALL_SIZE) ** 3 <= LONGEST_SECONDS:
            size = SIZE
        return 2.0 * size**3 / _time_product(size, dtype, seconds)
    finally:
        torch.set_num_threads(threads_before)


def _time_product(size: int, dtype: str, seconds: float) -> float:
    """Return the seconds of the fastest product on the CPU, tried for `seconds` and at least once."""
    left, right = (torch.ones(size, size, dtype=getattr(torch, dtype)) for _ in range(2))
    product = left @ right
    fastest, end = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        torch.mm(left, right, out=product)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _measure_gpu(dtype: str, seconds: float, device: str) -> float:
    try:
        # Equal numbers switch fewer transistors than random ones, so a GPU at its power limit multiplies them faster
        # than a model's numbers (https://www.thonking.ai/p/strangely-matrix-multiplications).
        left, right = (torch.randn(GPU_SIZE, GPU_SIZE, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        product = left @ right
        torch.cuda.synchronize(device)
        fastest, end = float("inf"), time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            torch.mm(left, right, out=product)
            torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - began)
    except RuntimeError as error:  # also of a device without free memory
        raise DeviceError(f"{device} cannot multiply matrices: {error}") from error
    return 2.0 * GPU_SIZE**3 / fastest
