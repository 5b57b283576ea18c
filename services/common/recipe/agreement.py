"""Refuses recipes whose sections contradict each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from services.common.hardware.instance_types import TRN1, Accelerators, family_of, read_instance_types

if TYPE_CHECKING:
    from services.common.recipe.schema import Recipe

ACCELERATORS: dict[str, Accelerators] = {"cuda": "GPUs", "neuron": "NeuronCores", "xla": "NeuronCores"}
"""Kind of accelerator by a recipe's device; a CPU is none."""


def require_agreement(recipe: Recipe) -> None:
    """Raise `ValueError`, whose message has both values, where two sections of a recipe contradict each other."""
    _require_shared_batch(recipe)
    _require_accelerators(recipe)
    if recipe.parallel.device == "xla":
        _require_fit_for_xla(recipe)
    _require_fixed_workers(recipe)
    if recipe.parallel.reduce_dtype == "bfloat16" and recipe.train.dtype != "bfloat16":
        raise ValueError(
            f"parallel.reduce_dtype 'bfloat16' needs train.dtype 'bfloat16', got {recipe.train.dtype!r}: a sum of "
            f"activations needs at least their own type"
        )
    _require_full_nodes(recipe)
    _require_equal_parts(recipe)
    begin, first = recipe.optimizer.warmup_begin_step, recipe.train.first_step
    if begin > first:
        raise ValueError(
            f"optimizer.warmup_begin_step {begin} must not be above {first}, the step at which the run begins "
            f"(train.branch.step, or 0)"
        )
    trained = recipe.tokenizer.train
    if trained and trained.vocab_size != recipe.model.vocab_size:
        raise ValueError(
            f"tokenizer.train.vocab_size {trained.vocab_size} and model.vocab_size {recipe.model.vocab_size} differ"
        )


def _require_shared_batch(recipe: Recipe) -> None:
    """Raise `ValueError` unless the copies of the model share the micro-batches evenly, and in a tree where exact."""
    number, models = recipe.batch.num_micro_batches, recipe.parallel.data_parallel_size
    if number % models:
        raise ValueError(
            f"{number} micro-batches per step (batch.global_batch_size / batch.micro_batch_size) cannot be shared by "
            f"parallel.data_parallel_size {models}"
        )
    if recipe.train.reduction == "exact" and number & (number - 1):
        raise ValueError(
            f"train.reduction = 'exact' sums micro-batches in a binary tree and needs a power of two of them, got "
            f"{number} (batch.global_batch_size / batch.micro_batch_size)"
        )


def _require_accelerators(recipe: Recipe) -> None:
    """Raise `ValueError` where the trainer's nodes have other accelerators than the recipe's device needs."""
    name, wanted = recipe.cluster.trainer_instance_type, ACCELERATORS.get(recipe.parallel.device)
    if name is None or wanted is None or read_instance_types()[name].accelerators == wanted:
        return
    fitting = [each.name for each in read_instance_types().values() if each.accelerators == wanted]
    device = "cuda" if wanted == "NeuronCores" else "neuron, or xla on trn1"
    raise ValueError(
        f"parallel.device {recipe.parallel.device!r} needs {wanted}, and cluster.trainer_instance_type {name} has "
        f"{read_instance_types()[name].accelerators}. Set a type with {wanted} ({', '.join(fitting)}), or the device "
        f"of {name} ({device})"
    )


def _require_fit_for_xla(recipe: Recipe) -> None:
    """Raise `ValueError` where a recipe for torch_xla asks for something that its graphs do not have."""
    cluster = recipe.cluster
    if not (recipe.compile.enabled and recipe.train.reduction == "fast"):
        raise ValueError(
            f"parallel.device 'xla' needs compile.enabled = true and train.reduction = 'fast', got "
            f"{recipe.compile.enabled} and {recipe.train.reduction!r}: torch_xla runs only compiled graphs, and the "
            f"tree of exact sums has a graph of its own for each micro-batch"
        )
    if not family_of(cluster.trainer_instance_type).startswith(TRN1):
        raise ValueError(
            f"parallel.device 'xla' is a NeuronCore of trn1, and cluster.trainer_instance_type is "
            f"{cluster.trainer_instance_type}, whose NeuronCores need 'neuron'"
        )


def _require_fixed_workers(recipe: Recipe) -> None:
    """Raise `ValueError` where a run may lose workers, and its graphs name workers."""
    device, min_nodes = recipe.parallel.device, recipe.cluster.min_nodes
    is_split = recipe.compile.enabled and recipe.parallel.tensor_parallel_size > 1
    if min_nodes is not None and (device == "xla" or (device == "neuron" and is_split)):
        raise ValueError(
            f"cluster.min_nodes {min_nodes} cannot be combined with parallel.device {device!r}: the graphs name the "
            f"workers that sum together, so a run with fewer workers needs another compile cache"
        )


def _require_full_nodes(recipe: Recipe) -> None:
    """Raise `ValueError` unless every node of the trainer has as many workers."""
    parallel, per_node = recipe.parallel, recipe.cluster.trainer_workers_per_node
    if parallel.num_workers % per_node:
        raise ValueError(
            f"the {parallel.num_workers} workers (parallel.data_parallel_size {parallel.data_parallel_size} x "
            f"parallel.tensor_parallel_size {parallel.tensor_parallel_size}) must be a multiple of "
            f"cluster.trainer_workers_per_node {per_node}, so that every node has as many workers. Change one of these "
            f"numbers, for example --cluster.trainer_workers_per_node=1"
        )


def _require_equal_parts(recipe: Recipe) -> None:
    """Raise `ValueError` unless heads, widths and sequence divide by the tensor-parallel workers."""
    model, parts = recipe.model, recipe.parallel.tensor_parallel_size
    shared = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.intermediate_size": model.intermediate_size,
        "corpus.sequence_length": recipe.corpus.sequence_length,
    }
    heads = model.num_key_value_heads

    def possible() -> str:
        largest = math.gcd(*shared.values())
        sizes = [
            size for size in range(1, largest + 1) if largest % size == 0 and (heads % size == 0 or size % heads == 0)
        ]
        return f"Possible sizes: {', '.join(map(str, sizes))}"

    for name, size in shared.items():
        if size % parts:
            raise ValueError(
                f"{name} {size:,} must be a multiple of parallel.tensor_parallel_size {parts}, because its workers "
                f"have equal parts. {possible()}"
            )
    if heads % parts and parts % heads:
        raise ValueError(
            f"model.num_key_value_heads {heads} and parallel.tensor_parallel_size {parts}: one must be a multiple "
            f"of the other, so that a worker has whole heads, or equally many workers hold a head. {possible()}"
        )
