"""Describes a checkpoint for a person: its slices, and the magnitude of its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
import xxhash

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.store import Artifact
from services.common.program.state import StateKind, StateSlice
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.shards import ShardReader

COLUMNS = ("parameter", "shape", "slices", "weight rms", "largest", "exp_avg rms", "exp_avg_sq mean")


def inspect(checkpoint: Artifact[CheckpointManifest], recipe: Recipe) -> Iterator[str]:
    """Yield lines about a verified checkpoint, of which one tensor at a time is in memory.

    Raises `ArtifactError` if the checkpoint is not of the recipe's model.
    """
    state, shapes = checkpoint.manifest.checkpoint, parameter_shapes(recipe.model)
    reader = ShardReader(checkpoint, shapes)
    yield f"checkpoint  {checkpoint.path}"
    yield f"state       after step {state.step:,}: {state.tokens:,} tokens, {state.skipped_steps:,} steps skipped"
    if state.parent:
        yield f"parent      {state.parent.run} after step {state.parent.step:,}, {state.parent.content_digest[:12]}"
    yield f"workers     {state.data_parallel_size} x {state.tensor_parallel_size} (data x tensor parallel)"
    rows: list[tuple[str, ...]] = [COLUMNS]
    digest, kinds = xxhash.xxh3_128(), get_args(StateKind)
    for name, shape in shapes.items():
        tensors = {kind: torch.empty(shape) for kind in kinds}
        reader.read({StateSlice.whole(kind, name, shape): tensor for kind, tensor in tensors.items()})
        for tensor in tensors.values():
            digest.update(tensor.numpy().data)
        weight = tensors["weight"]
        numbers = (
            weight.square().mean().sqrt(),
            weight.abs().max(),
            tensors["exp_avg"].square().mean().sqrt(),
            tensors["exp_avg_sq"].mean(),
        )
        size, slices = " x ".join(map(str, shape)), reader.num_slices("weight", name)
        rows.append((name, size, f"{slices}", *(f"{number.item():.3e}" for number in numbers)))
    yield f"digest      {digest.hexdigest()} (of the values: equal for equal states, whatever the layout of workers)"
    yield ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
