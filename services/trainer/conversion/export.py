"""Exports a checkpoint as a Hugging Face folder, or as an NxD checkpoint."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.manifest import sync_folder, write_durably
from services.common.artifacts.store import Artifact
from services.common.errors import STORAGE_ERRNOS, ArtifactError, RecipeError, explain_storage_error
from services.common.input.files import InputFileError
from services.common.program.initial_weights import VOCABULARY_WEIGHTS
from services.common.program.llama import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.conversion.averaging import open_last, read_means
from services.trainer.conversion.configuration import CONFIG, GENERATION_CONFIG, hugging_face_config
from services.trainer.conversion.hugging_face import write_weights
from services.trainer.conversion.nxd.checkpoint import write_nxd_model
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.conversion.tokenizer_export import write_tokenizer
from services.trainer.run import Run, vocabulary_file

logger = logging.getLogger(__name__)

PROVENANCE = "provenance.json"
"""Name of the file in a Hugging Face folder that names the run, and the checkpoints whose mean the weights are."""
ALLOW_NON_FINITE_WEIGHTS = "--allow-non-finite-weights"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    run: Run,
    output: Path,
    nxd: NxdLayout | None = None,
    *,
    allow_non_finite: bool = False,
    average_last: int = 1,
    dtype: str = "float32",
) -> Path:
    """Make the folder `output` with config.json, weights in `dtype` and the tokenizer; it is complete or absent.

    `AutoModelForCausalLM` and `AutoTokenizer` of transformers open the folder; see `write_tokenizer` for vocabularies
    that transformers cannot encode with. A model that was imported has its configuration again, as
    `hugging_face_config` describes, and its rows of padding; other models have a row for each id. With a layout the
    weights are those of an NxD checkpoint, and `output` is its tag's folder. The weights are means over the last
    `average_last` checkpoints, which provenance.json names.

    Raises `ArtifactError` for weights that are not finite, unless they are allowed; then it logs a warning. Raises it
    also where the run has fewer checkpoints than are to be averaged.
    """
    _require_new(output)
    checkpoints = open_last(run, average_last)
    partial = output.with_name(f".export-{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        _write(run, checkpoints, partial, nxd, allow_non_finite, dtype)
        _rename_to_new(partial, output)
        sync_folder(output.parent)
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS or isinstance(error, InputFileError):
            raise
        error.filename = error.filename or str(output)
        raise explain_storage_error(error, option="--output") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # exists only after an error
    return output


def _require_new(output: Path) -> None:
    """Raise `RecipeError` unless the folder `output` can be made."""
    if os.path.lexists(output):
        raise RecipeError(f"{output}: exists already. Name a folder that does not exist, or remove this one first.")
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise RecipeError(f"{output}: {above} is not a folder, so no folder can be made in it. Pass another --output.")


def _write(
    run: Run,
    checkpoints: Sequence[Artifact[CheckpointManifest]],
    folder: Path,
    nxd: NxdLayout | None,
    allow_non_finite: bool,
    dtype: str,
) -> None:
    vocabulary, imported = run.corpus.manifest.corpus.vocabulary, run.checkpoint.manifest.checkpoint.imported
    model = _exported_model(run, nxd)
    config = hugging_face_config(run.recipe, model, vocabulary, dtype, imported)
    write_durably(folder / CONFIG, json.dumps(config, indent=2).encode())
    if imported and imported.generation_config:
        write_durably(folder / GENERATION_CONFIG, json.dumps(imported.generation_config, indent=2).encode())
    write_tokenizer(folder, run.corpus, vocabulary_file(run), imported.tokenizer_config if imported else {})
    shapes = parameter_shapes(run.recipe.model)
    readers = [ShardReader(checkpoint, shapes) for checkpoint in checkpoints]

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        weights = read_means(readers, names)
        for name, weight in weights.items():
            _require_finite(run.checkpoint.path, name, weight, allow_non_finite)
            if name in VOCABULARY_WEIGHTS:
                weights[name] = _resize(weight, model.num_vocab_rows)
        return {name: _round(run.checkpoint.path, name, weight, dtype) for name, weight in weights.items()}

    if nxd:
        write_nxd_model(folder, model, nxd, read)
    else:
        write_durably(folder / PROVENANCE, json.dumps(_describe_origin(checkpoints), indent=2).encode())
        write_weights(folder, parameter_shapes(model), DTYPES[dtype], read)


def _exported_model(run: Run, nxd: NxdLayout | None) -> Model:
    """Return the run's model with the rows of an export: those of the imported model, or as many as there are ids, and
    for NxD as many more as its ranks need for equal parts.
    """
    model, is_imported = run.recipe.model, run.checkpoint.manifest.checkpoint.imported is not None
    rows = model.num_vocab_rows if is_imported else model.vocab_size
    return model.model_copy(update={"padded_vocab_size": rows + (-rows % nxd.tensor_parallel_size if nxd else 0)})


def _round(checkpoint: Path, name: str, weight: Tensor, dtype: str) -> Tensor:
    """Round a weight to `dtype`. Raises `RecipeError` for values that are too large for it."""
    rounded = weight.to(DTYPES[dtype])
    if num_bad := int((rounded.isinf() & ~weight.isinf()).sum()):
        raise RecipeError(
            f"{checkpoint}: {name}: {num_bad:,} of {weight.numel():,} values are too large for --dtype {dtype}. Pass "
            f"--dtype bfloat16 or float32."
        )
    return rounded


def _resize(weight_VD: Tensor, num_rows: int) -> Tensor:
    """Cut the rows from `num_rows` on, or add rows of zeros."""
    missing = max(0, num_rows - len(weight_VD))
    return torch.nn.functional.pad(weight_VD[:num_rows], (0, 0, 0, missing)) if missing else weight_VD[:num_rows]


def _describe_origin(checkpoints: Sequence[Artifact[CheckpointManifest]]) -> dict[str, Any]:
    """Name the checkpoints whose mean the weights are; usually there is one."""
    return {
        "run": checkpoints[-1].manifest.name,
        "checkpoints": [
            {"step": each.manifest.checkpoint.step, "content_digest": each.manifest.content_digest}
            for each in checkpoints
        ],
    }


def _require_finite(checkpoint: Path, name: str, weight: Tensor, allow_non_finite: bool) -> None:
    num_bad = int((~torch.isfinite(weight)).sum())
    if not num_bad:
        return
    problem = f"{checkpoint}: {name}: {num_bad:,} of {weight.numel():,} values are NaN or infinite"
    if not allow_non_finite:
        raise ArtifactError(
            f"{problem}: a model with such weights computes nothing. Move this checkpoint's folder away to export the "
            f"one before, or pass {ALLOW_NON_FINITE_WEIGHTS} to export them anyway."
        )
    logger.warning("%s, but are exported", problem)


def _rename_to_new(partial: Path, output: Path) -> None:
    try:
        partial.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RecipeError(
            f"{output}: was made by another program during the export. Name a folder that does not exist."
        ) from error
