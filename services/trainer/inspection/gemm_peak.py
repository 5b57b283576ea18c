"""Measures the speed of matrix products on this machine, with which the model FLOP/s of a step are compared."""

from __future__ import annotations

import time

import torch

from services.common.errors import DeviceError

CPU_SIZE, SMALL_CPU_SIZE = 1024, 256
"""Rows and columns on a CPU: the small size where a product of the other takes longer than LONGEST_SECONDS."""
LONGEST_SECONDS = 0.5
"""A product of CPU_SIZE in bfloat16 takes 2.2 s on an AMD EPYC without avx512_bf16."""
GPU_SIZE = 8192
"""Rows and columns on a GPU: a product takes milliseconds, so that its launch does not matter."""


def measure_gemm_peak(dtype: str, threads: int, seconds: float = 0.5, device: str = "cpu") -> float:
    """Return the FLOP/s of the fastest product of two square matrices of `dtype`, tried for `seconds`.

    `threads` are those of the CPU. Raises `DeviceError` if a GPU such as "cuda:0" cannot multiply, for example because
    other processes hold its memory.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = GPU_SIZE
        if device == "cpu":
            of_small = _time_product(SMALL_CPU_SIZE, dtype, seconds / 10, device)
            size = CPU_SIZE if of_small * (CPU_SIZE / SMALL_CPU_SIZE) ** 3 <= LONGEST_SECONDS else SMALL_CPU_SIZE
        return 2.0 * size**3 / _time_product(size, dtype, seconds, device)
    except RuntimeError as error:
        raise DeviceError(f"{device} cannot multiply matrices: {error}") from error
    finally:
        torch.set_num_threads(threads_before)


def _time_product(size: int, dtype: str, seconds: float, device: str) -> float:
    """Return the seconds of the fastest product, tried for `seconds` and at least once."""
    # Equal numbers switch fewer transistors, so that a GPU at its power limit multiplies them faster than a model's
    # (https://www.thonking.ai/p/strangely-matrix-multiplications). On a CPU random ones would draw from torch's seed.
    make = torch.ones if device == "cpu" else torch.randn
    left, right = (make(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    product, fastest, end = left @ right, float("inf"), time.perf_counter() + seconds
    while (started := time.perf_counter()) < end or fastest == float("inf"):
        torch.mm(left, right, out=product)
        if device != "cpu":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
