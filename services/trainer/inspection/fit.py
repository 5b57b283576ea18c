"""Whether a worker's memory holds what a run needs, and which changes of its recipe would make it fit."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import ValidationError

from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB, InstanceType, read_instance_types
from services.common.recipe.memory_estimate import memory_of_worker
from services.common.recipe.schema import Recipe

Changes = dict[str, str | int]
"""Recipe values by dotted name, as a command line overrides them."""


def instance_type(recipe: Recipe) -> InstanceType | None:
    """Of the trainer's nodes, where the recipe says it, with cores as small as its workers on a node need."""
    name = recipe.cluster.trainer_instance_type
    return read_instance_types()[name].divided_for(recipe.cluster.trainer_workers_per_node) if name else None


def require_fit(recipe: Recipe) -> None:
    """Raise `RecipeError` where a node has fewer NeuronCores or GPUs than workers, or a worker less memory than its
    part of the run takes at its peak; the message names what to change next.

    Without an instance type in the recipe there is nothing to compare with.
    """
    device, cluster = instance_type(recipe), recipe.cluster
    if device is None:
        return
    if cluster.trainer_workers_per_node > device.workers:
        raise RecipeError(
            f"cluster.trainer_workers_per_node {cluster.trainer_workers_per_node}: a {device.name} has "
            f"{device.workers} {device.accelerators}, one for each worker. Pass "
            f"--cluster.trainer_workers_per_node={device.workers}"
        )
    memory = memory_of_worker(recipe)
    if memory.peak_bytes > device.worker_memory_bytes:
        largest = max(memory.parts, key=lambda part: max(part.sizes))
        raise RecipeError(
            f"a worker needs about {memory.peak_bytes / GIB:.1f} GiB at its peak, and one of {device.name} has "
            f"{device.worker_memory_bytes / GIB:.0f} GiB. Its largest part: {largest.name}. {_advise(recipe, device)}"
        )


def _advise(recipe: Recipe, device: InstanceType) -> str:
    """The first change with which the run fits; all of them, one upon the other, where none is enough alone."""
    together: Changes = {}
    for changes in _cheapest_first(recipe):
        for candidate in (changes, together | changes):
            changed = _change(recipe, candidate)
            if changed and memory_of_worker(changed).peak_bytes <= device.worker_memory_bytes:
                needed = memory_of_worker(changed).peak_bytes / GIB
                options = " ".join(f"--{name}={value}" for name, value in candidate.items())
                return f"Change next: {options} (then about {needed:.1f} GiB)"
        if _change(recipe, together | changes):
            together |= changes
    return (
        "No sharding, reduction, activation checkpointing or tensor parallelism that divides this model makes it fit: "
        "take a smaller model or sequence, or nodes whose workers have more memory"
    )


def _cheapest_first(recipe: Recipe) -> Iterator[Changes]:
    """What takes less memory, from what costs least time to what costs most."""
    parallel, batch = recipe.parallel, recipe.batch
    yield {"parallel.zero_stage": 1}
    if recipe.train.dtype == "bfloat16":
        yield {"train.param_dtype": "bfloat16"}
    yield {"train.reduction": "fast"}
    yield {"train.activation_checkpointing": "full"}
    if batch.micro_batch_size > 1:
        yield {"batch.micro_batch_size": 1}
    factor = 2
    while parallel.data_parallel_size % factor == 0:
        yield {
            "parallel.tensor_parallel_size": parallel.tensor_parallel_size * factor,
            "parallel.data_parallel_size": parallel.data_parallel_size // factor,
        }
        factor *= 2


def _change(recipe: Recipe, changes: Changes) -> Recipe | None:
    """The recipe with these values; None where they do not go with its others."""
    values = recipe.model_dump(mode="json")
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        values[section][key] = value
    try:
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError:
        return None
