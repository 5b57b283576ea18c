"""Write a checkpoint as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` opens, or as one of NxD."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from services.common.artifacts.manifest import sync_folder, write_durably
from services.common.errors import STORAGE_ERRNOS, ArtifactError, RecipeError, explain_storage_error
from services.common.input.files import InputFileError, read_file
from services.common.program.llama import parameter_shapes
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.conversion.hugging_face import CONFIG, hugging_face_config, write_weights
from services.trainer.conversion.nxd.checkpoint import write_nxd_model
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.run import Run, vocabulary_file

logger = logging.getLogger(__name__)

ALLOW_NON_FINITE_WEIGHTS = "--allow-non-finite-weights"


def export(run: Run, output: Path, nxd: NxdLayout | None = None, *, allow_non_finite: bool = False) -> Path:
    """Make `output` with config.json, the weights (float32) and the vocabulary's file; complete or absent.

    With a layout, the weights are those of an NxD checkpoint, of which `output` is the tag's folder.

    Encode with the library whose file it is. AutoTokenizer in transformers 5 rebuilds merges from a SentencePiece model
    by id instead of by score and gives other ids for runs of spaces.

    Raises `ArtifactError` for weights that are not finite, unless they are allowed: then they are warned of.
    """
    _require_new(output)
    partial = output.with_name(f".export-{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        _write(run, partial, nxd, allow_non_finite)
        _rename_to_new(partial, output)
        sync_folder(output.parent)
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS or isinstance(error, InputFileError):
            raise
        error.filename = error.filename or str(output)
        raise explain_storage_error(error, option="--output") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone by now, unless something failed
    return output


def _require_new(output: Path) -> None:
    """Raise `RecipeError` unless a folder can be made there."""
    if os.path.lexists(output):
        raise RecipeError(f"{output}: exists already. Name a folder that does not, or remove this one first.")
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise RecipeError(f"{output}: {above} is no folder, so none can be made in it. Pass another --output.")


def _write(run: Run, folder: Path, nxd: NxdLayout | None, allow_non_finite: bool) -> None:
    vocabulary = run.corpus.manifest.corpus.vocabulary
    shapes = parameter_shapes(run.recipe.model)
    write_durably(folder / CONFIG, json.dumps(hugging_face_config(run.recipe, vocabulary), indent=2).encode())
    write_durably(folder / Path(vocabulary.path).name, read_file(vocabulary_file(run)))
    reader = ShardReader(run.checkpoint, shapes)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        weights = reader.read_weights(names, allows_non_finite=True)
        for name, weight in weights.items():
            _require_finite(run.checkpoint.path, name, weight, allow_non_finite)
        return weights

    if nxd:
        write_nxd_model(folder, run.recipe.model, nxd, read)
    else:
        write_weights(folder, shapes, read)


def _require_finite(checkpoint: Path, name: str, weight: Tensor, allow_non_finite: bool) -> None:
    num_bad = int((~torch.isfinite(weight)).sum())
    if not num_bad:
        return
    told = f"{checkpoint}: {name}: {num_bad:,} of {weight.numel():,} values are NaN or infinite"
    if not allow_non_finite:
        raise ArtifactError(
            f"{told}: a model with them computes nothing. Move this checkpoint's folder away to export the one before "
            f"it, or pass {ALLOW_NON_FINITE_WEIGHTS} to export them as they are."
        )
    logger.warning("%s, exported as they are", told)


def _rename_to_new(partial: Path, output: Path) -> None:
    try:
        partial.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RecipeError(f"{output}: somebody made it meanwhile. Name a folder that does not exist.") from error
