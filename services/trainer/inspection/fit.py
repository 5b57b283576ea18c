"""Checks whether a run fits into its workers' memory, and finds changes of the recipe that make it fit."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from itertools import accumulate, chain

from pydantic import ValidationError

from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB, InstanceType
from services.common.recipe.derived import instance_type
from services.common.recipe.memory_estimate import memory_of_worker
from services.common.recipe.schema import Recipe, stage_nodes

Changes = dict[str, str | int]
"""Recipe values by dotted name, as a command line overrides them."""


def require_fit(recipe: Recipe) -> None:
    """Raise `RecipeError` if a node has more workers than NeuronCores or GPUs, or a worker too little memory.

    The message names the change that makes the run fit. Without an instance type in the recipe nothing is checked.
    """
    device, cluster = instance_type(recipe), recipe.cluster
    if device is None:
        return
    if cluster.trainer_workers_per_node > device.workers:
        raise RecipeError(
            f"cluster.trainer_workers_per_node {cluster.trainer_workers_per_node}: a {device.name} has "
            f"{device.workers} {device.accelerators}, one for each worker. Pass --cluster.trainer_workers_per_node="
            f"{max(n for n in range(1, device.workers + 1) if recipe.parallel.num_workers % n == 0)}"
        )
    memory = memory_of_worker(recipe)
    if memory.peak_bytes > device.worker_memory_bytes:
        largest = max(memory.parts, key=lambda part: max(part.sizes))
        raise RecipeError(
            f"a worker needs about {memory.peak_bytes / GIB:.1f} GiB at its peak, but a worker of {device.name} has "
            f"{device.worker_memory_bytes / GIB:.0f} GiB. Its largest part: {largest.name}. {_advise(recipe, device)}"
        )


def _advise(recipe: Recipe, device: InstanceType) -> str:
    """Describe the cheapest change with which the run fits, or several changes together if no single one is enough."""
    single = [changes for changes in _cheapest_first(recipe) if _change(recipe, changes)]
    for changes in chain.from_iterable(zip(single, accumulate(single, operator.or_), strict=True)):
        changed = _change(recipe, changes)
        if changed and memory_of_worker(changed).peak_bytes <= device.worker_memory_bytes:
            needed = memory_of_worker(changed).peak_bytes / GIB
            options = " ".join(f"--{name}={value}" for name, value in changes.items())
            return f"Change next: {options} (then about {needed:.1f} GiB)"
    return (
        "No sharding, reduction, activation checkpointing or tensor parallelism that divides this model makes it fit: "
        "use a smaller model or sequence, or nodes whose workers have more memory"
    )


def _cheapest_first(recipe: Recipe) -> Iterator[Changes]:
    """Yield changes that save memory, from the cheapest in time to the most expensive."""
    parallel, batch = recipe.parallel, recipe.batch
    yield {"parallel.zero_stage": 1}
    if recipe.train.dtype == "bfloat16":
        yield {"train.param_dtype": "bfloat16"}
    is_on_one_node = stage_nodes(recipe, "trainer") == 1
    if is_on_one_node:  # else it sends each micro-batch's gradients between nodes
        yield {"parallel.zero_stage": 2}
    yield {"train.reduction": "fast"}
    yield {"train.activation_checkpointing": "full"}
    if not is_on_one_node:
        yield {"parallel.zero_stage": 2}
    if is_on_one_node:
        yield {"parallel.zero_stage": 3}
    if batch.micro_batch_size > 1:
        yield {"batch.micro_batch_size": 1}
    if not is_on_one_node:
        yield {"parallel.zero_stage": 3}
    factor = 2
    while parallel.data_parallel_size % factor == 0:
        yield {
            "parallel.tensor_parallel_size": parallel.tensor_parallel_size * factor,
            "parallel.data_parallel_size": parallel.data_parallel_size // factor,
        }
        factor *= 2


def _change(recipe: Recipe, changes: Changes) -> Recipe | None:
    """Return the recipe with these values; None if they do not fit its other values."""
    values = recipe.model_dump(mode="json")
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        values[section][key] = value
    try:
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError:
        return None
