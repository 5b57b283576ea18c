"""Write a checkpoint as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` opens."""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.manifest import sync_folder, write_durably
from services.common.errors import RecipeError
from services.common.recipe import Recipe
from services.trainer.run import Run, vocabulary_file
from services.trainer.sample import load_weights


def export(run: Run, output: Path) -> Path:
    """Make `output` with config.json, model.safetensors (float32) and the vocabulary's file; complete or absent.

    Encode with the library whose file it is. AutoTokenizer in transformers 5 rebuilds merges from a SentencePiece model
    by id instead of by score and gives other ids for runs of spaces.
    """
    if output.exists():
        raise RecipeError(f"{output}: exists already. Name a folder that does not, or remove this one first.")
    partial = output.with_name(f".export-{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        _write(run, partial)
        _rename_to_new(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone by now, unless something failed
    sync_folder(output.parent)
    return output


def _write(run: Run, folder: Path) -> None:
    vocabulary = run.corpus.manifest.corpus.vocabulary
    weights = load_weights(run)
    write_durably(folder / "model.safetensors", safetensors.torch.save(weights, metadata={"format": "pt"}))
    write_durably(folder / "config.json", json.dumps(hugging_face_config(run.recipe, vocabulary), indent=2).encode())
    write_durably(folder / Path(vocabulary.path).name, vocabulary_file(run).read_bytes())


def _rename_to_new(partial: Path, output: Path) -> None:
    try:
        partial.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise RecipeError(f"{output}: somebody made it meanwhile. Name a folder that does not exist.") from error


def hugging_face_config(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Any]:
    """The model as transformers' LlamaConfig describes it."""
    model = recipe.model.model_dump(mode="json", exclude={"preset", "rope_scaling", "rope_theta"})
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": recipe.model.rope_theta}
    if recipe.model.rope_scaling:
        rope |= {"rope_type": "llama3", **recipe.model.rope_scaling.model_dump()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **model,
        "head_dim": recipe.model.head_dim,
        "max_position_embeddings": recipe.corpus.sequence_length,
        # transformers 5 reads rope_parameters, 4 the two keys after it.
        "rope_parameters": rope,
        "rope_theta": recipe.model.rope_theta,
        "rope_scaling": rope if recipe.model.rope_scaling else None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
