"""Exports a checkpoint, or the mean of a run's last checkpoints, as a Hugging Face folder or as an NxD checkpoint.

The mean of checkpoints along a run does for the weights what a falling learning rate does: LAWA (arXiv 2306.03241)
averages distant checkpoints of a run with a high rate, and Llama 3 (arXiv 2407.21783, section 3.4.3) those of its
annealing phase.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.manifest import sync_folder
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError, RecipeError
from services.common.problem_list import list_names
from services.common.program.initial_weights import VOCABULARY_WEIGHTS
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.checkpoints.lookup import open_checkpoint, require_of_run, verify_checkpoint
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.conversion.configuration import CONFIG, GENERATION_CONFIG, Dtype, cut_ids, export_config
from services.trainer.conversion.hugging_face import write_weights
from services.trainer.conversion.nxd.checkpoint import write_nxd_model
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.conversion.tokenizer import write_tokenizer
from services.trainer.job import describe_corpora
from services.trainer.runs.run import Run, vocabulary_file

PROVENANCE = "provenance.json"
"""Names the run, and the checkpoints whose mean the weights are."""

logger = logging.getLogger(__name__)


def export(
    run: Run,
    output: Path,
    nxd: NxdLayout | None = None,
    *,
    average_last: int = 1,
    dtype: Dtype = "float32",
    keep_padding: bool = False,
) -> Path:
    """Make the folder `output` with config.json, weights in `dtype` and the tokenizer; it is complete or absent.

    Embedding and head have a row for each id, and with `keep_padding` the model's rows of padding, to which other
    programs give a probability. With a layout the weights are an NxD checkpoint, and `output` is its tag's folder.

    Raises `ArtifactError` for weights that are not finite, and where the run has fewer checkpoints than `average_last`;
    `RecipeError` where `output` exists or `dtype` cannot hold the weights.
    """
    if os.path.lexists(output):
        raise RecipeError(f"{output}: exists already. Pass another --output, or remove this folder first.")
    checkpoints = _open_last(run, average_last)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=output.parent) as scratch:
        partial = Path(scratch) / output.name
        partial.mkdir()
        _write(run, checkpoints, partial, nxd, dtype, keep_padding)
        for path in (*partial.rglob("*"), partial):
            sync_folder(path)  # files, too
        partial.rename(output)
    sync_folder(output.parent)
    return output


def _open_last(run: Run, count: int) -> list[Artifact[CheckpointManifest]]:
    """Open and verify the last `count` checkpoints, oldest first; the last is the run's newest intact one."""
    newest, collection = run.checkpoint.manifest.checkpoint.step, run.checkpoint.path.parent
    steps = [step for step in checkpoint_steps(collection) if step <= newest]
    if len(steps) < count:
        raise ArtifactError(
            f"{collection}: has {len(steps)} checkpoints, expected {count} to average: steps "
            f"{list_names(map(str, steps))}. A run keeps those that checkpoint.keep_latest and keep_interval_steps say."
        )
    earlier = [open_checkpoint(collection, step, verify_checkpoint) for step in steps[-count:-1]]
    for checkpoint in earlier:
        require_of_run(checkpoint, run.recipe, describe_corpora(run.recipe, run.corpora))
    return [*earlier, run.checkpoint]


def _write(
    run: Run,
    checkpoints: Sequence[Artifact[CheckpointManifest]],
    folder: Path,
    nxd: NxdLayout | None,
    dtype: Dtype,
    keep_padding: bool,
) -> None:
    vocabulary, imported = run.corpus.manifest.corpus.vocabulary, run.checkpoint.manifest.checkpoint.imported
    model = _exported_model(run.recipe.model, nxd, keep_padding)
    imported = imported and cut_ids(imported, model.num_vocab_rows)
    _write_json(folder / CONFIG, export_config(run.recipe, model, vocabulary, dtype, imported))
    if imported and imported.generation_config:
        _write_json(folder / GENERATION_CONFIG, imported.generation_config)
    write_tokenizer(folder, run.corpus, vocabulary_file(run.corpus), imported.tokenizer_config if imported else {})
    shapes = parameter_shapes(run.recipe.model)
    readers = [ShardReader(checkpoint, shapes) for checkpoint in checkpoints]

    def read(name: str) -> Tensor:
        weight = _read_mean(readers, name)
        if name in VOCABULARY_WEIGHTS:
            weight = _resize(weight, model.num_vocab_rows)
        return _round(run.checkpoint.path, name, weight, dtype)

    if nxd:
        write_nxd_model(folder, model, nxd, read)
        return
    origin = [
        {"step": each.manifest.checkpoint.step, "content_digest": each.manifest.content_digest} for each in checkpoints
    ]
    _write_json(folder / PROVENANCE, {"run": run.checkpoint.manifest.name, "checkpoints": origin})
    write_weights(folder, parameter_shapes(model), getattr(torch, dtype), read)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _exported_model(model: Model, nxd: NxdLayout | None, keep_padding: bool) -> Model:
    """Return the model with the embedding rows of an export, and tell them; NxD's ranks need equal parts of them."""
    held, ids = model.num_vocab_rows, model.vocab_size
    rows = held if keep_padding else ids
    rows += -rows % nxd.tensor_parallel_size if nxd else 0
    if rows > ids:
        padding = "the others are padding, to which other programs give a probability: their loss is not the run's"
        logger.warning("embedding and head have %s rows for %s ids; %s", f"{rows:,}", f"{ids:,}", padding)
    elif held > ids:
        logger.info("embedding and head lose %s rows of padding; --keep-padding keeps them", f"{held - ids:,}")
    return model.model_copy(update={"padded_vocab_size": rows})


def _read_mean(readers: Sequence[ShardReader], name: str) -> Tensor:
    """Return the mean of a weight over checkpoints, summed in float64 and rounded to float32 once."""
    first, *others = readers
    total = first.read_weights([name])[name].double()
    for reader in others:
        total += reader.read_weights([name])[name]
    return (total / len(readers)).to(torch.float32)


def _resize(weight_VD: Tensor, num_rows: int) -> Tensor:
    """Cut the rows from `num_rows` on, or add rows of zeros."""
    return torch.nn.functional.pad(weight_VD[:num_rows], (0, 0, 0, max(0, num_rows - len(weight_VD))))


def _round(checkpoint: Path, name: str, weight: Tensor, dtype: Dtype) -> Tensor:
    rounded = weight.to(getattr(torch, dtype))
    if num_bad := int((rounded.isinf() & ~weight.isinf()).sum()):
        raise RecipeError(
            f"{checkpoint}: {name}: {num_bad:,} of {weight.numel():,} values are too large for --dtype {dtype}. Pass "
            f"--dtype bfloat16 or float32."
        )
    return rounded
