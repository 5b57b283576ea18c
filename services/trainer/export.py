"""Write a checkpoint as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` opens, or as one of NxD."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from pathlib import Path

from services.common.artifacts.manifest import sync_folder, write_durably
from services.common.errors import STORAGE_ERRNOS, RecipeError, explain_storage_error
from services.common.program.llama import parameter_shapes
from services.trainer.hugging_face import CONFIG, hugging_face_config, write_weights
from services.trainer.nxd.checkpoint import write_nxd_model
from services.trainer.nxd.layout import NxdLayout
from services.trainer.run import Run, vocabulary_file
from services.trainer.shards import ShardReader


def export(run: Run, output: Path, nxd: NxdLayout | None = None) -> Path:
    """Make `output` with config.json, the weights (float32) and the vocabulary's file; complete or absent.

    With a layout, the weights are those of an NxD checkpoint, of which `output` is the tag's folder.

    Encode with the library whose file it is. AutoTokenizer in transformers 5 rebuilds merges from a SentencePiece model
    by id instead of by score and gives other ids for runs of spaces.
    """
    _require_new(output)
    partial = output.with_name(f".export-{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        _write(run, partial, nxd)
        _rename_to_new(partial, output)
        sync_folder(output.parent)
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS:
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


def _write(run: Run, folder: Path, nxd: NxdLayout | None) -> None:
    vocabulary = run.corpus.manifest.corpus.vocabulary
    shapes = parameter_shapes(run.recipe.model)
    write_durably(folder / CONFIG, json.dumps(hugging_face_config(run.recipe, vocabulary), indent=2).encode())
    write_durably(folder / Path(vocabulary.path).name, vocabulary_file(run).read_bytes())
    read = ShardReader(run.checkpoint, shapes).read_weights
    if nxd:
        write_nxd_model(folder, run.recipe.model, nxd, read)
    else:
        write_weights(folder, shapes, read)


def _rename_to_new(partial: Path, output: Path) -> None:
    try:
        partial.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RecipeError(f"{output}: somebody made it meanwhile. Name a folder that does not exist.") from error
