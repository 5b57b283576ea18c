"""Checks a node's GPUs or NeuronCores: whether each worker has one, and a GPU the memory that a worker needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from services.common.errors import DeviceError
from services.common.hardware.gpus import VISIBLE_VARIABLE, Gpu, list_visible_gpus
from services.common.hardware.image_platform import NEURON_DEVICES, neuron_chips
from services.common.recipe.memory_estimate import memory_of_worker, show_size
from services.common.recipe.schema import Recipe
from services.trainer.inspection.findings import Finding, ok, problem, warning
from services.trainer.inspection.fit import instance_type


def check_gpus(recipe: Recipe, workers: int) -> Iterator[Finding]:
    """Check the GPUs of a node with `workers`. Raises `DeviceError` if nvidia-smi fails."""
    gpus, visible = list_visible_gpus(), os.environ.get(VISIBLE_VARIABLE, "not set")
    kinds = Counter(f"{gpu.name} with driver {gpu.driver}" for gpu in gpus)
    found = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none"
    seen = f"{found} ({VISIBLE_VARIABLE}: {visible}), {workers} workers take one each"
    if len(gpus) < workers:
        error = DeviceError(f"{seen}: {workers - len(gpus)} too few")
        yield problem("GPUs", error, f"lower cluster.trainer_workers_per_node, or raise {VISIBLE_VARIABLE}")
    else:
        yield ok("GPUs", seen)
    if gpus:
        yield _check_memory(gpus[:workers], memory_of_worker(recipe).peak_bytes)


def _check_memory(gpus: list[Gpu], peak_bytes: int) -> Finding:
    check, takes = "GPU memory", f"a worker takes {show_size(peak_bytes)} at its peak, libraries not counted"
    sizes = {gpu: gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None}
    if not sizes:
        return ok(check, f"the driver does not report it; {takes}")
    smallest = min(sizes, key=lambda gpu: sizes[gpu])
    seen = f"{show_size(sizes[smallest])} each; {takes}"
    if peak_bytes > sizes[smallest]:
        return problem(check, DeviceError(f"GPU {smallest.index}: {seen}"), "`plan` shows what uses the memory")
    used = {gpu: gpu.used_bytes or 0 for gpu in sizes}
    taken = [gpu for gpu in sizes if used[gpu] > sizes[gpu] // 2 or used[gpu] + peak_bytes > sizes[gpu]]
    if taken:
        named = ", ".join(f"{show_size(used[gpu])} of GPU {gpu.index}" for gpu in taken)
        return warning(check, f"{seen}; other processes hold {named}", "find them with nvidia-smi")
    return ok(check, seen)


def check_neuron_cores(recipe: Recipe, workers: int) -> Iterator[Finding]:
    """Check that a node's chips have a logical NeuronCore for each of its `workers`.

    The driver lists chips alone, so the cores of a chip are those of the recipe's instance type.
    """
    check, chips, node = "NeuronCores", len(neuron_chips()), instance_type(recipe)
    seen = f"{chips} chips in {NEURON_DEVICES}, {workers} workers take a logical core each"
    if not chips:
        start = f"start the container with --device={NEURON_DEVICES}/neuron0 ..., and compare with neuron-ls"
        yield warning(check, f"{seen}: the library is a stand-in, or the container has no devices", start)
    elif node is None:
        yield ok(check, f"{seen}; their number is unknown without cluster.trainer_instance_type")
    else:
        of_chip = node.workers // node.chips
        size = f", each of {node.logical_core_size} physical" if node.logical_core_size else ""
        seen = f"{seen}; a chip of {node.name} has {of_chip}{size}"
        if chips * of_chip < workers:
            error = DeviceError(f"{seen}: {workers - chips * of_chip} too few")
            yield problem(check, error, f"--cluster.trainer_workers_per_node={chips * of_chip}, or add devices")
        else:
            yield ok(check, seen)
