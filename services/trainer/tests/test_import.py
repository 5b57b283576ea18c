"""A run that begins with the weights of a Hugging Face folder, and what is in a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from services.common.artifacts.corpus import VocabularyKind
from services.common.errors import ArtifactError, RecipeError
from services.common.program.transformer import parameter_shapes
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.schema import Model
from services.trainer.conversion.configuration import require_same_model
from services.trainer.conversion.dcp import DcpWeights
from services.trainer.conversion.export import export
from services.trainer.conversion.hugging_face import HuggingFaceWeights
from services.trainer.conversion.weight_import import digest_weights, import_weights
from services.trainer.inspection.sample import load_weights
from services.trainer.job import Job
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import NewJob, make_recipe, train_here, train_new, write_recipe
from services.trainer.tests.foreign_checkpoints import save
from services.trainer.tests.runs import call_trainer, train_alone

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def shared_export(new_shared_job: NewJob) -> Path:
    job = train_new(new_shared_job, train__max_steps="1")
    return export(open_run(job.root, job.run), job.root.parent / "hugging-face")


@pytest.fixture
def exported(tmp_path: Path, shared_export: Path) -> Path:
    """The folder of a model of the small recipe, beside the root of its run."""
    return shutil.copytree(shared_export.parent, tmp_path / "copy") / "hugging-face"


def import_from(capfd: pytest.CaptureFixture[str], exported: Path, *options: str) -> tuple[int, str]:
    recipe, root = write_recipe(exported.parent), exported.parent / "a"
    return call_trainer(capfd, recipe, root, f"--from={exported}", *options, command="import")


SP, JSON, CONFIG = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"


@pytest.fixture(scope="module")
def vocabularies(new_shared_job: NewJob) -> dict[VocabularyKind, Job]:
    """A run of a step on a corpus of each kind of vocabulary. That of tokenizer.json is Hugging Face's, too."""
    kinds: tuple[VocabularyKind, ...] = ("sentencepiece", "tokenizer_json", "hugging_face")
    jobs = {kind: new_shared_job(f"of-{kind}", kind=kind, train__max_steps="1") for kind in kinds}
    for job in jobs.values():
        train_here(job)
    return jobs


@pytest.mark.parametrize(
    ("corpus", "weights", "files", "refused"),
    [
        ("sentencepiece", "sentencepiece", (SP, JSON, CONFIG), ""),
        ("sentencepiece", "sentencepiece", (SP,), ""),
        ("sentencepiece", "sentencepiece", (JSON,), ""),
        ("sentencepiece", "sentencepiece", (JSON, CONFIG), ""),
        ("sentencepiece", "tokenizer_json", (JSON,), JSON),
        ("sentencepiece", "hugging_face", (JSON, CONFIG), JSON),
        ("tokenizer_json", "tokenizer_json", (JSON, CONFIG), ""),  # puts BOS before a text, as the corpus's does not
        ("tokenizer_json", "hugging_face", (JSON, CONFIG), ""),
        ("tokenizer_json", "sentencepiece", (JSON, CONFIG), JSON),
        ("tokenizer_json", "sentencepiece", (SP, CONFIG), SP),
        ("hugging_face", "tokenizer_json", (JSON,), ""),
        ("hugging_face", "sentencepiece", (SP,), SP),
        ("hugging_face", "sentencepiece", (SP, JSON, CONFIG), "."),
        ("sentencepiece", "sentencepiece", (), ""),
    ],
)
def test_weights_fit_a_corpus_with_their_ids_whatever_the_forms_of_both_tokenizers(
    tmp_path: Path,
    vocabularies: dict[VocabularyKind, Job],
    corpus: VocabularyKind,
    weights: VocabularyKind,
    files: tuple[str, ...],
    refused: str,
) -> None:
    job = vocabularies[weights]
    folder = export(open_run(job.root, job.run), tmp_path / "hugging-face")
    for name in {SP, JSON, CONFIG} - {*files}:
        (folder / name).unlink(missing_ok=True)

    with pytest.raises(RecipeError) as error:
        import_weights(vocabularies[corpus], folder)

    assert ("initial_weights" in str(error.value), f"{folder / refused}" in str(error.value)) == (not refused, True)


def test_the_tokenizer_in_the_corpus_s_own_form_decides(capfd: pytest.CaptureFixture[str], exported: Path) -> None:
    (exported / SP).write_bytes(b"another")
    code, printed = import_from(capfd, exported)
    assert (code, SP in printed) == (2, True), printed


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
    assert train_alone(capfd, recipe, root, named)[0] == 3  # not imported yet

    code, printed = import_from(capfd, exported, named)
    assert code == 0, printed
    run = open_run(root, Path(printed.splitlines()[-1]).parent.name)
    theirs = safetensors.torch.load_file(exported / "model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_weights(run).items())
    assert import_from(capfd, exported, named)[0] == 3

    assert train_alone(capfd, recipe, root, named, "--train.max_steps=2")[0] == 0
    assert "resuming after step=0" in (run.folder / "logs" / "rank-00000.log").read_text()

    code, printed = call_trainer(capfd, recipe, root, command="inspect-checkpoint", run=run.name)
    assert code == 0, printed
    assert re.search(r"^digest      [0-9a-f]{32} ", printed, re.MULTILINE)
    assert re.search(r"^model.layers.1.mlp.down_proj.weight +16 x 32 +1 ", printed, re.MULTILINE), printed
    assert call_trainer(capfd, recipe, root, "--step=7", command="inspect-checkpoint", run=run.name)[0] == 3


PLAIN = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-05}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)


@pytest.mark.parametrize(
    ("changes", "error", "place"),
    [
        ({"num_key_value_heads": 2}, RecipeError, "num_key_value_heads"),
        ({"rms_norm_eps": 1e-2}, RecipeError, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, RecipeError, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, RecipeError, "rope_parameters"),
        ({"model_type": "mistral"}, RecipeError, "model_type"),
        ({"model_type": "qwen3"}, RecipeError, "model_type"),
        ({"head_dim": 16}, RecipeError, "head_dim"),
        ({"hidden_act": "gelu"}, RecipeError, "hidden_act"),
        ({"attention_bias": True}, RecipeError, "attention_bias"),
        ({"tie_word_embeddings": True}, RecipeError, "tie_word_embeddings"),
        ({"vocab_size": 320}, RecipeError, "padded_vocab_size = 320"),
        ({"vocab_size": None}, ArtifactError, "vocab_size"),
        ({"max_position_embeddings": "2048"}, ArtifactError, "max_position_embeddings"),
        ({"model_type": "unknown"}, ArtifactError, "config.json"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception], place: str) -> None:
    model = make_recipe(tmp_path).model
    config = {**PLAIN, **{name: value for name, value in model.model_dump().items() if name in SIZES}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_same_model(tmp_path, model)

    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=place):
        require_same_model(tmp_path, model)


GROUPED = {"num_key_value_heads": 8, "rope_theta": 500000.0, "attention_bias": False}
ROPE_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_window_layers": 28,
    "sliding_window": None,
}
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "llama2-7b": ((32000, 4096, 11008, 32, 32), {"num_key_value_heads": 32, "pretraining_tp": 1, "rope_scaling": None}),
    "llama2-13b": ((32000, 5120, 13824, 40, 40), {}),  # as before grouped heads, without num_key_value_heads
    "llama3-8b": ((128256, 4096, 14336, 32, 32), {**GROUPED, "rope_scaling": None, "tie_word_embeddings": False}),
    "llama3-70b": ((128256, 8192, 28672, 80, 64), {**GROUPED, "rope_scaling": None, "tie_word_embeddings": False}),
    "llama3.1-8b": ((128256, 4096, 14336, 32, 32), {**GROUPED, "rope_scaling": {**ROPE_3_1, "rope_type": "llama3"}}),
    "tinyllama-1.1b": ((32000, 2048, 5632, 22, 32), {"num_key_value_heads": 4, "rope_scaling": None}),
    "qwen3-0.6b": ((151936, 1024, 3072, 28, 16), {**QWEN3, "tie_word_embeddings": True}),
    "qwen3-1.7b": ((151936, 2048, 6144, 28, 16), {**QWEN3, "tie_word_embeddings": True}),
    "qwen3-4b": ((151936, 2560, 9728, 36, 32), {**QWEN3, "tie_word_embeddings": True}),
    "qwen3-8b": ((151936, 4096, 12288, 36, 32), {**QWEN3, "tie_word_embeddings": False}),
}
PUBLISHED = {name: {**PLAIN, **dict(zip(SIZES, sizes, strict=False)), **more} for name, (sizes, more) in SHAPES.items()}
"""Each model's own config.json, in the format of transformers 4."""


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_the_configurations_that_models_are_published_with_are_those_of_the_presets(
    tmp_path: Path, preset: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[preset]))
    require_same_model(tmp_path, Model(**MODEL_PRESETS[preset]))
    for other in set(MODEL_PRESETS) - {preset}:
        with pytest.raises(RecipeError, match="recipe's model"):
            require_same_model(tmp_path, Model(**MODEL_PRESETS[other]))


def test_a_qwen3_with_windows_is_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-8b"] | windows))
    with pytest.raises(RecipeError, match="use_sliding_window"):
        require_same_model(tmp_path, Model(**MODEL_PRESETS["qwen3-8b"]))


NORM = "model.norm.weight"


@pytest.mark.parametrize("is_dcp", [False, True], ids=["safetensors", "DCP"])
@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "more"),
        (lambda tensors: tensors.update({NORM: torch.ones(17)}), NORM),
        (lambda tensors: tensors.update({NORM: torch.ones(16).double()}), NORM),
        (lambda tensors: tensors[NORM][3:5].fill_(float("nan")), NORM),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, change: Change, place: str, is_dcp: bool) -> None:
    model = make_recipe(tmp_path).model
    shapes = parameter_shapes(model)
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    change(tensors)
    if is_dcp:
        save(tmp_path / "dcp", tensors)
    else:
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")

    def read_all() -> None:
        with ExitStack() as opened:
            weights = DcpWeights(tmp_path / "dcp", model) if is_dcp else HuggingFaceWeights(tmp_path, shapes, opened)
            digest_weights(shapes, weights.read)

    with pytest.raises(ArtifactError, match=place):
        read_all()


@pytest.mark.parametrize("is_dcp", [False, True], ids=["safetensors", "DCP"])
def test_a_tied_model_s_head_that_is_not_the_embedding_is_refused(
    capfd: pytest.CaptureFixture[str], exported: Path, is_dcp: bool
) -> None:
    """transformers keeps such a head, too."""
    tied = {"tie_word_embeddings": True}
    config, file = json.loads((exported / "config.json").read_text()), exported / "model.safetensors"
    (exported / "config.json").write_text(json.dumps(config | tied))
    found, weights = [], safetensors.torch.load_file(file)
    for head in (weights["lm_head.weight"], weights["model.embed_tokens.weight"].clone()):
        held = {**weights, "lm_head.weight": head}
        safetensors.torch.save_file(held, file, metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(exported)
        assert torch.equal(model.lm_head.weight, head)
        if is_dcp:
            shutil.rmtree(exported / "dcp", ignore_errors=True)
            save(exported / "dcp", held)
        folder = exported / "dcp" if is_dcp else exported
        found.append(import_from(capfd, exported, "--model.tie_word_embeddings=true", f"--from={folder}")[1])
    assert ["tie_word_embeddings = false" in printed for printed in found] == [True, False]
    assert digest_in(found[1])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (shutil.rmtree, "hugging-face"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"), "model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "model.safetensors.index.json"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing"}}'),
            "missing",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    capfd: pytest.CaptureFixture[str], exported: Path, change: Callable[[Path], object], place: str
) -> None:
    change(exported)

    code, printed = import_from(capfd, exported)

    assert (code, place in printed) == (3, True), printed


def test_the_files_that_an_index_names_are_imported_in_any_type_that_float32_holds(
    capfd: pytest.CaptureFixture[str], exported: Path
) -> None:
    digest = digest_in(import_from(capfd, exported)[1])
    tensors = safetensors.torch.load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    files = {name: f"model-{number % 2 + 1:05d}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    (exported / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    for dtype in (torch.float32, torch.bfloat16):
        for file in set(files.values()):
            mine = {name: tensor.to(dtype) for name, tensor in tensors.items() if files[name] == file}
            safetensors.torch.save_file(mine, exported / file)
        found = digest_in(import_from(capfd, exported)[1])
        assert (found == digest) == (dtype is torch.float32)
    assert import_from(capfd, exported, f"--train.initial_weights={found}")[0] == 0
