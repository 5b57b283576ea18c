"""Finds settings of recipes that keep a step from the fast kernels of its device. It needs no torch and no device."""

from __future__ import annotations

from services.common.hardware.instance_types import GIB
from services.common.recipe.schema import Recipe

FLASH_SEQUENCE_MULTIPLE, MAX_FLASH_HEAD_DIM = 512, 128
"""Sequences and heads that TorchNeuron's flash attention takes."""


def slow_paths(recipe: Recipe) -> dict[str, str]:
    """Return the parts of the recipe's step that its device runs with a slow kernel, each with its reason.

    A public copy of TorchNeuron's source from before its beta has one flash attention, in NKI.
    """
    if recipe.parallel.device != "neuron":
        return {}
    length, model, parallel = recipe.corpus.sequence_length, recipe.model, recipe.parallel
    reasons = []
    if length % FLASH_SEQUENCE_MULTIPLE:
        reasons.append(f"corpus.sequence_length {length:,} is no multiple of {FLASH_SEQUENCE_MULTIPLE}")
    if model.head_dim > MAX_FLASH_HEAD_DIM:
        reasons.append(f"a head has {model.head_dim} dimensions, more than {MAX_FLASH_HEAD_DIM}")
    if recipe.train.attention_mask == "block_causal":
        reasons.append("train.attention_mask = 'block_causal' gives it a mask")
    if not reasons:
        return {}
    scores = recipe.batch.micro_batch_size * model.num_attention_heads // parallel.tensor_parallel_size * length**2
    size = f"{scores * (4 if recipe.train.dtype == 'float32' else 2) / GIB:,.2f} GiB"
    return {
        "attention": f"TorchNeuron's flash attention does not take this recipe, because {' and '.join(reasons)}: a "
        f"layer keeps all scores in memory, {size} a copy, which the estimate of memory leaves out"
    }
