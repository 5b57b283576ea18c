"""A run that begins with the weights of a Hugging Face folder, and what is in a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from services.common.errors import RecipeError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.llama import parameter_shapes
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.schema import Model
from services.trainer.conversion.configuration import require_same_model
from services.trainer.conversion.export import export
from services.trainer.conversion.weight_import import digest_weights, import_weights
from services.trainer.inspection.sample import load_weights
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.run import open_run
from services.trainer.tests.builders import LLAMA_3_1, write_recipe
from services.trainer.tests.runs import call_trainer, checkpoints, train_alone

ALONE = WorkerEnvironment(rank=0, world_size=1)
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def exported(tmp_path: Path, new_job: Callable[..., Job]) -> Path:
    """The folder of a model of the small recipe, beside the root of its run."""
    job = new_job(train__max_steps="1")
    train(job, ALONE)
    return export(open_run(job.root, job.run), tmp_path / "hugging-face")


def import_from(capfd: pytest.CaptureFixture[str], exported: Path, *options: str) -> tuple[int, str]:
    recipe, root = write_recipe(exported.parent), exported.parent / "a"
    return call_trainer(capfd, recipe, root, f"--from={exported}", *options, command="import")


def test_weights_of_an_exported_folder_fit_its_vocabulary_and_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], new_job: Callable[..., Job]
) -> None:
    """The exported tokenizer.json is not the corpus's file: it puts BOS before a text."""
    job = new_job(kind="tokenizer_json", train__max_steps="1")
    train(job, ALONE)
    exported = export(open_run(job.root, job.run), tmp_path / "hugging-face")
    code, printed = import_from(capfd, exported)
    assert (code, "initial_weights" in printed) == (2, True), printed

    tokenizer = json.loads((exported / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].reverse()
    (exported / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, printed = import_from(capfd, exported)
    assert (code, "tokenizer.json: is another vocabulary" in printed) == (2, True), printed


def digest_in(printed: str) -> str:
    found = re.search(r'initial_weights = "([0-9a-f]{64})"', printed)
    assert found, printed
    return found[1]


def test_a_run_begins_with_imported_weights_that_its_recipe_names(
    capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    recipe, root = write_recipe(exported.parent), exported.parent / "a"
    code, printed = import_from(capfd, exported)
    assert code == 2
    named = f"--train.initial_weights={digest_in(printed)}"

    code, printed = train_alone(capfd, recipe, root, named)
    assert (code, "train.initial_weights" in printed) == (3, True)

    code, printed = import_from(capfd, exported, named)
    assert code == 0, printed
    begin = Path(printed.splitlines()[-1])
    run = open_run(root, begin.parent.name)
    theirs = safetensors.torch.load_file(exported / "model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_weights(run).items())

    code, printed = import_from(capfd, exported, named)
    assert (code, "has begun already" in printed) == (3, True)

    assert train_alone(capfd, recipe, root, named, "--train.max_steps=2")[0] == 0
    assert "resuming after step=0" in (run.folder / "logs" / "rank-00000.log").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(num_key_value_heads=2), "num_key_value_heads: config.json has 2, the recipe's"),
        (lambda config: config["rope_parameters"].update(rope_theta=5e5), "rope_theta: config.json has 500000.0, the"),
        (
            lambda config: config.update(rope_scaling={"rope_type": "yarn"}),
            'rope_scaling: config.json has {"rope_type": "yarn"}, the recipe\'s model null',
        ),
        (lambda config: config.update(model_type="mistral"), 'model_type: config.json has "mistral"'),
        (lambda config: config.update(attention_bias=True), "attention_bias: config.json has true"),
    ],
)
def test_another_model_is_not_imported(
    capfd: pytest.CaptureFixture[str], exported: Path, change: Change, message: str
) -> None:
    config = json.loads((exported / "config.json").read_text())
    change(config)
    (exported / "config.json").write_text(json.dumps(config))

    code, printed = import_from(capfd, exported)

    assert (code, message in printed) == (2, True), printed
    assert list(checkpoints(exported.parent / "a")) == ["step-00000001"]


def published(
    hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **others,
    }


GROUPED = {"num_key_value_heads": 8, "rope_theta": 500000.0, "attention_bias": False}
ROPE_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PUBLISHED = {
    "llama2-7b": published(4096, 11008, 32, 32, 32000, num_key_value_heads=32, pretraining_tp=1, rope_scaling=None),
    "llama2-13b": published(5120, 13824, 40, 40, 32000),  # as before grouped heads, without num_key_value_heads
    "llama3-8b": published(4096, 14336, 32, 32, 128256, **GROUPED, rope_scaling=None, tie_word_embeddings=False),
    "llama3.1-8b": published(
        4096, 14336, 32, 32, 128256, **GROUPED, rope_scaling={**ROPE_3_1, "rope_type": "llama3"}, mlp_bias=False
    ),
    "tinyllama-1.1b": published(2048, 5632, 22, 32, 32000, num_key_value_heads=4, pretraining_tp=1, rope_scaling=None),
}
"""Return the model's own config.json in the format of transformers 4."""


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    rope = {
        "rope_theta": config.get("rope_theta", 10_000.0),
        "rope_type": "default",
        **(config.get("rope_scaling") or {}),
    }
    others = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    return {**others, "rope_parameters": rope}


@pytest.mark.parametrize("write", [dict, as_transformers_5], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_the_configurations_that_models_are_published_with_are_those_of_the_presets(
    tmp_path: Path, preset: str, write: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(write(PUBLISHED[preset])))

    require_same_model(tmp_path, Model(**MODEL_PRESETS[preset]))

    for other in set(MODEL_PRESETS) - {preset}:
        with pytest.raises(RecipeError, match="recipe's model"):
            require_same_model(tmp_path, Model(**MODEL_PRESETS[other]))


@pytest.mark.parametrize("shape", [LLAMA_3_1, {"model__tie_word_embeddings": "true"}], ids=["3.1", "tied"])
def test_a_folder_of_any_shape_is_exported_and_imported_with_the_same_bits(
    tmp_path: Path, new_job: Callable[..., Job], shape: dict[str, str]
) -> None:
    job = new_job("begun", train__max_steps="1", **shape)
    train(job, ALONE)
    run = open_run(job.root, job.run)
    folder, weights = export(run, tmp_path / "hugging-face"), load_weights(run)
    named = digest_weights(parameter_shapes(job.recipe.model), weights.__getitem__)

    begun = new_job("imported", **shape, train__initial_weights=named)
    import_weights(begun, folder)

    found = load_weights(open_run(begun.root, begun.run))
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "1 missing (lm_head.weight), 0 unknown"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "0 missing (none), 1 unknown (more)"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(17)}),
            "norm.weight is F32 [17], expected [16]",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(16).double()}), "is F64 [16], expected [16]"),
        (
            lambda tensors: tensors["model.norm.weight"][3:5].fill_(float("nan")),
            "hugging-face: model.norm.weight: 2 of 16 values are NaN or infinite",
        ),
    ],
)
def test_other_weights_are_not_imported(
    capfd: pytest.CaptureFixture[str], exported: Path, change: Change, message: str
) -> None:
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, exported / "model.safetensors")

    code, printed = import_from(capfd, exported)

    assert (code, message in printed) == (3, True), printed


def test_weights_whose_files_are_not_there_are_asked_for(capfd: pytest.CaptureFixture[str], exported: Path) -> None:
    (exported / "model.safetensors").rename(exported / "pytorch_model.bin")
    code, printed = import_from(capfd, exported)
    found = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    assert (code, [name in printed for name in found]) == (3, [True] * 3), printed

    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    code, printed = import_from(capfd, exported)
    missing = "model-00001-of-00002.safetensors: missing, but model.safetensors.index.json"
    assert (code, missing in printed) == (3, True), printed


def test_weights_of_another_vocabulary_are_not_imported(capfd: pytest.CaptureFixture[str], exported: Path) -> None:
    (exported / "tokenizer.model").write_bytes(b"another")

    code, printed = import_from(capfd, exported)

    assert (code, "tokenizer.model: " in printed) == (2, True)


def test_the_files_that_an_index_names_are_imported_in_any_type_that_float32_holds(
    capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    digest = digest_in(import_from(capfd, exported)[1])
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    files = {name: f"model-{number % 2 + 1:05d}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    (exported / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    def write(dtype: torch.dtype) -> None:
        for file in set(files.values()):
            mine = {name: tensor.to(dtype) for name, tensor in tensors.items() if files[name] == file}
            safetensors.torch.save_file(mine, exported / file)

    write(torch.float32)
    assert digest_in(import_from(capfd, exported)[1]) == digest

    write(torch.bfloat16)
    rounded = digest_in(import_from(capfd, exported)[1])
    assert rounded != digest
    assert import_from(capfd, exported, f"--train.initial_weights={rounded}")[0] == 0


def test_an_inspected_checkpoint_shows_every_parameter_and_a_digest_of_its_values(
    capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    recipe, root = write_recipe(exported.parent), exported.parent / "a"
    code, printed = call_trainer(capfd, recipe, root, command="inspect-checkpoint")

    assert code == 0, printed
    assert "state       after step 1: 128 tokens, 0 steps skipped" in printed
    assert re.search(r"^digest      [0-9a-f]{32} ", printed, re.MULTILINE)
    assert re.search(r"^model.layers.1.mlp.down_proj.weight +16 x 32 +1 ", printed, re.MULTILINE), printed

    code, printed = call_trainer(capfd, recipe, root, "--step=7", command="inspect-checkpoint")
    assert (code, "has no checkpoint after step 7. Pass --step with one of 1." in printed) == (3, True), printed
