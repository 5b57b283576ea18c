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
    _require_devices(recipe)
    _require_equal_parts(recipe)
    if recipe.parallel.reduce_dtype == "bfloat16" and recipe.train.dtype != "bfloat16":
        raise ValueError(f"parallel.reduce_dtype 'bfloat16' needs train.dtype 'bfloat16', got {recipe.train.dtype!r}")
    start, first = recipe.optimizer.warmup_begin_step, recipe.train.first_step
    if start > first:
        raise ValueError(
            f"optimizer.warmup_begin_step {start} must not be above {first}, the step at which the run begins "
            f"(train.branch.step, or 0)"
        )
    own, mixture = recipe.corpus.name, recipe.train.mixture
    if mixture and own not in mixture:
        raise ValueError(
            f"train.mixture has {', '.join(mixture)}, and not the recipe's own corpus (corpus.name): give {own} a "
            f"weight, or train with the recipe of one of these corpora"
        )
    trained = recipe.tokenizer.train
    if trained and trained.vocab_size != recipe.model.vocab_size:
        raise ValueError(
            f"tokenizer.train.vocab_size {trained.vocab_size} and model.vocab_size {recipe.model.vocab_size} differ: "
            f"--tokenizer.train.vocab_size={recipe.model.vocab_size} or --model.vocab_size={trained.vocab_size}"
        )


def _require_shared_batch(recipe: Recipe) -> None:
    number, models = recipe.batch.num_micro_batches, recipe.parallel.data_parallel_size
    is_exact = recipe.train.reduction == "exact"
    if number % models == 0 and not (is_exact and number & (number - 1)):
        return
    needs, fitting, shared = "", models, -(-number // models) * models
    if is_exact:
        needs, fitting = "a power of two, as train.reduction = 'exact' needs, and ", 1 << models.bit_length() - 1
        shared = 1 << (max(number, fitting) - 1).bit_length()
    options = f"--parallel.data_parallel_size={fitting} " if fitting != models else ""
    raise ValueError(
        f"{number} micro-batches per step (batch.global_batch_size / batch.micro_batch_size), expected {needs}a "
        f"multiple of parallel.data_parallel_size {models}: "
        f"{options}--batch.global_batch_size={shared * recipe.batch.micro_batch_size}"
    )


def _require_devices(recipe: Recipe) -> None:
    """Raise `ValueError` where the trainer's nodes lack the recipe's device, or its graphs cannot do what is asked."""
    device, cluster, name = recipe.parallel.device, recipe.cluster, recipe.cluster.trainer_instance_type
    wanted, types = ACCELERATORS.get(device), read_instance_types()
    if name and wanted and types[name].accelerators != wanted:
        fitting = ", ".join(each.name for each in types.values() if each.accelerators == wanted)
        raise ValueError(
            f"parallel.device {device!r} needs {wanted}, and cluster.trainer_instance_type {name} has "
            f"{types[name].accelerators}. Types with {wanted}: {fitting}"
        )
    if device == "xla" and not (recipe.compile.enabled and recipe.train.reduction == "fast"):
        raise ValueError(
            f"parallel.device 'xla' needs compile.enabled = true and train.reduction = 'fast', got "
            f"{recipe.compile.enabled} and {recipe.train.reduction!r}"
        )
    if device == "xla" and not family_of(name).startswith(TRN1):
        raise ValueError(f"parallel.device 'xla' is trn1's, cluster.trainer_instance_type {name}, which needs 'neuron'")
    if recipe.parallel.zero_stage == 3 and device not in ("cpu", "cuda"):
        raise ValueError(
            f"parallel.zero_stage 3 needs parallel.device 'cpu' or 'cuda', got {device!r}: use 1 or 2 with a larger "
            f"parallel.tensor_parallel_size"
        )
    is_split = recipe.compile.enabled and recipe.parallel.tensor_parallel_size > 1
    if cluster.min_nodes is not None and (device == "xla" or (device == "neuron" and is_split)):
        raise ValueError(
            f"cluster.min_nodes {cluster.min_nodes} cannot be combined with parallel.device {device!r}: the graphs "
            f"name the workers that sum together, so a run with fewer workers needs another compile cache"
        )
    workers, per_node = recipe.parallel.num_workers, cluster.trainer_workers_per_node
    if workers % per_node:
        raise ValueError(
            f"the {workers} workers (parallel.data_parallel_size x parallel.tensor_parallel_size) must be a multiple "
            f"of cluster.trainer_workers_per_node {per_node}, for example --cluster.trainer_workers_per_node=1"
        )


def _require_equal_parts(recipe: Recipe) -> None:
    """Raise `ValueError` unless heads, widths and sequence divide by the tensor-parallel workers."""
    model, parts, heads = recipe.model, recipe.parallel.tensor_parallel_size, recipe.model.num_key_value_heads
    shared = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.intermediate_size": model.intermediate_size,
        "corpus.sequence_length": recipe.corpus.sequence_length,
    }
    wrong = [f"{name} {size:,}" for name, size in shared.items() if size % parts]
    if heads % parts and parts % heads:
        wrong.append(f"model.num_key_value_heads {heads}")
    if wrong:
        largest = math.gcd(*shared.values())
        sizes = [size for size in range(1, largest + 1) if largest % size == 0 and not (heads % size and size % heads)]
        raise ValueError(
            f"{', '.join(wrong)} and parallel.tensor_parallel_size {parts} do not fit: workers have equal parts, and "
            f"whole heads or a copy of one. Possible sizes: {', '.join(map(str, sizes))}"
        )
