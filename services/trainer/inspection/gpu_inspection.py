"""Checks one node's GPUs: their number, kind, memory, and speed of matrix products."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import torch

from services.common.errors import DeviceError
from services.common.hardware.gpu_peaks import PEAK_TFLOPS, find_peak
from services.common.hardware.instance_types import TERA
from services.common.hardware.nvidia_smi import VISIBLE_VARIABLE, Gpu, list_visible_gpus
from services.common.recipe.derived import causal_flops_per_token, tokens_per_step
from services.common.recipe.memory_estimate import memory_of_worker
from services.common.recipe.schema import Recipe
from services.trainer.inspection.findings import Finding, ok, problem, show_size, warning
from services.trainer.inspection.gemm_peak import measure_gemm_peak

MEASURED_SECONDS = 0.3
"""Seconds for which each GPU of a node multiplies: they take turns, and a node may have eight."""


def look_at_gpus(recipe: Recipe, workers: int) -> Iterator[Finding]:
    """Check that the node has a GPU for each of its `workers`, with a worker's memory.

    Raises `DeviceError` if nvidia-smi fails.
    """
    check, gpus = "GPUs", list_visible_gpus()
    visible = os.environ.get(VISIBLE_VARIABLE, "not set")
    drivers = ", ".join(sorted({gpu.driver for gpu in gpus}))
    found = f"{_count_kinds(gpus)} with driver {drivers}" if gpus else "none"
    seen = f"{found} ({VISIBLE_VARIABLE}: {visible}); {workers} workers take one each"
    if len(gpus) < workers:
        yield problem(
            check,
            DeviceError(f"{seen}, so {workers - len(gpus)} of them would have none"),
            f"start fewer workers on a node (cluster.trainer_workers_per_node), or let the command see more "
            f"({VISIBLE_VARIABLE})",
        )
    else:
        yield ok(check, f"{seen}; {_describe_peaks(recipe, gpus[:workers])}")
    if gpus:
        yield _look_at_memory(recipe, gpus[:workers])


def look_at_products(recipe: Recipe, workers: int, speeds: list[float]) -> Iterator[Finding]:
    """Let each GPU of the node's `workers` multiply matrices, one after another, and add the node's FLOP/s to `speeds`.

    All workers wait for the slowest GPU in every step, so a node is as fast as so many of its slowest one. Raises
    `DeviceError` where a GPU cannot multiply.
    """
    check, dtype = "matrix products", recipe.train.dtype
    count = min(workers, torch.cuda.device_count())
    if not count:
        yield ok(check, "not measured: torch finds no GPU here")
        return
    each = [measure_gemm_peak(dtype, 1, MEASURED_SECONDS, f"cuda:{number}") for number in range(count)]
    slowest = min(each)
    speeds.append(count * slowest)
    peak = find_peak(torch.cuda.get_device_name(each.index(slowest)))
    share = f", {slowest / peak:.0%} of its published peak" if peak and dtype == "bfloat16" else ""
    seconds = causal_flops_per_token(recipe) * tokens_per_step(recipe) / (recipe.parallel.num_workers * slowest)
    which = f"of GPU {each.index(slowest)}, the slowest of {count}" if count > 1 else "of the GPU"
    yield ok(check, f"{slowest / TERA:,.0f} TFLOP/s in {dtype} {which}{share}, at which a step takes {seconds:,.3f} s")


def _count_kinds(gpus: list[Gpu]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(gpu.name for gpu in gpus).items()))


def _describe_peaks(recipe: Recipe, gpus: list[Gpu]) -> str:
    """Describe the peak with which the metric `mfu` compares a run on these GPUs."""
    if recipe.cluster.trainer_instance_type:
        return f"MFU is relative to the peak of {recipe.cluster.trainer_instance_type}"
    names = sorted({gpu.name for gpu in gpus})
    if unknown := [name for name in names if name not in PEAK_TFLOPS]:
        return (
            f"the peak of {', '.join(unknown)} is unknown, so the metrics have no mfu "
            f"(services/common/hardware/gpu_peaks.py lists the known peaks)"
        )
    return "MFU is relative to " + ", ".join(f"{PEAK_TFLOPS[name]:,g} TFLOP/s of each {name}" for name in names)


def _look_at_memory(recipe: Recipe, gpus: list[Gpu]) -> Finding:
    """Check the memory of the workers' GPUs, and whether other processes use it."""
    check, peak = "GPU memory", memory_of_worker(recipe).peak_bytes
    sizes = {gpu: gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None}
    takes = f"a worker takes {show_size(peak)} at its peak, libraries not counted"
    if not sizes:
        return ok(check, f"the driver does not report it; {takes}")
    smallest = min(sizes, key=lambda gpu: sizes[gpu])
    seen = f"{show_size(sizes[smallest])} each; {takes}"
    if peak > sizes[smallest]:
        return problem(
            check,
            DeviceError(f"GPU {smallest.index}: {seen}"),
            "run `plan`, which shows what uses the memory and what to change",
        )
    taken = [gpu for gpu in sizes if _is_taken(gpu, sizes[gpu], peak)]
    if taken:
        used = ", ".join(f"{show_size(gpu.used_bytes or 0)} of GPU {gpu.index}" for gpu in taken)
        return warning(check, f"{seen}; other processes hold {used}", "find these processes with nvidia-smi")
    return ok(check, seen)


def _is_taken(gpu: Gpu, memory_bytes: int, peak_bytes: int) -> bool:
    """Return whether other processes hold most of the GPU's memory, or leave a worker too little."""
    used = gpu.used_bytes or 0
    return used > memory_bytes // 2 or used + peak_bytes > memory_bytes
