"""A model that was imported and exported has its own configuration again, apart from what training changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from services.common.errors import ArtifactError, RecipeError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.llama import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.configuration import read_imported
from services.trainer.conversion.export import export
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.conversion.weight_import import digest_weights, import_weights
from services.trainer.inspection.sample import load_model
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.runs.run import Run, open_run
from services.trainer.tests.builders import LLAMA_3_1, train_new, write_recipe
from services.trainer.tests.runs import call_trainer

ALONE = WorkerEnvironment(rank=0, world_size=1)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
PAD = {"content": "<pad>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2, chat": {
        "config.json": {
            **LLAMA,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "pretraining_tp": 1,
            "use_cache": False,
            "attention_dropout": 0.1,
            "rope_scaling": None,
            "torch_dtype": "float16",
        },
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "model_max_length": 10**30,
            "padding_side": "left",
            "chat_template": "{{ messages }}",
        },
        "special_tokens_map.json": {"pad_token": {"content": "<unk>", "lstrip": False}},
    },
    "Llama 3.1, instruct": {
        "config.json": {
            **LLAMA,
            "max_position_embeddings": 131072,
            "bos_token_id": 1,
            "eos_token_id": [2, 5, 7],
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 500000.0,
            "rope_scaling": {**SCALING, "rope_type": "llama3"},
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42.3",
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 5, 7], "temperature": 0.6, "do_sample": True},
        "tokenizer_config.json": {"model_max_length": 131072, "eos_token": "<s>", "clean_up_tokenization_spaces": True},
        "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
    },
    "transformers 5": {
        "config.json": {
            **LLAMA,
            "dtype": "bfloat16",
            "head_dim": 8,
            "max_position_embeddings": 77,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "shorter": {
        "config.json": {**LLAMA, "max_position_embeddings": 8},
        "tokenizer_config.json": {"model_max_length": 8},
    },
    "rows of padding, one of them for a pad token": {
        "config.json": {**LLAMA, "vocab_size": 320, "pad_token_id": 300, "max_position_embeddings": 2048},
        "tokenizer_config.json": {"pad_token": "<pad>", "added_tokens_decoder": {"300": PAD}, "model_max_length": 2048},
    },
}
RECIPES: dict[str, dict[str, str]] = {
    "Llama 3.1, instruct": LLAMA_3_1,
    "transformers 5": {"model__tie_word_embeddings": "true"},
    "rows of padding, one of them for a pad token": {"model__padded_vocab_size": "320"},
}


def write_published(folder: Path, name: str, model: Model, scale: float) -> str:
    """Write a folder with random weights in bfloat16, and return their digest."""
    folder.mkdir()
    for file, content in PUBLISHED[name].items():
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    generator, shapes = torch.Generator().manual_seed(0), parameter_shapes(model)
    weights = {
        each: torch.randn(shape, generator=generator).mul(scale).bfloat16() for each, shape in sorted(shapes.items())
    }
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return digest_weights(shapes, lambda each: weights[each].float())


@pytest.fixture
def import_published(tmp_path: Path, new_job: Callable[..., Job]) -> Callable[..., Job]:
    """Begin a run with the published model of a name, in `tmp_path / "published"`."""

    def begin(name: str, scale: float = 0.1, **overrides: str) -> Job:
        overrides = {"train__max_steps": "2", **RECIPES.get(name, {}), **overrides}
        digest = write_published(tmp_path / "published", name, new_job(**overrides).recipe.model, scale)
        job = new_job(train__initial_weights=digest, **overrides)
        import_weights(job, tmp_path / "published")
        return job

    return begin


def opened(job: Job) -> Run:
    return open_run(job.root, job.run)


def read(folder: Path, file: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / file).read_text())
    return content


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_bytes_again_and_after_training_its_configuration(
    tmp_path: Path, import_published: Callable[..., Job], name: str
) -> None:
    job, published = import_published(name, train__max_steps="1"), tmp_path / "published"
    before = transformers.AutoConfig.from_pretrained(published).to_dict() | {"_name_or_path": ""}
    generation = None
    if "generation_config.json" in PUBLISHED[name]:
        generation = transformers.GenerationConfig.from_pretrained(published).to_dict()
    theirs = safetensors.torch.load_file(published / "model.safetensors")
    untrained = export(opened(job), tmp_path / "untrained", dtype="bfloat16")
    ours = safetensors.torch.load_file(untrained / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[each]) for each, tensor in theirs.items())
    shutil.rmtree(published)
    train(job, ALONE)
    shutil.rmtree(job.checkpoint_collection / "step-00000000")

    folder = export(opened(job), tmp_path / "exported", dtype="bfloat16")

    after = transformers.AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""}
    positions = max(16, before["max_position_embeddings"])  # those of the run's sequences, too
    assert after == {**before, "dtype": "bfloat16", "max_position_embeddings": positions}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokens_BS = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    logits: Tensor = load_model(opened(job)).logits(tokens_BS)
    torch.testing.assert_close(model(tokens_BS).logits[..., :300], logits, rtol=0, atol=0.05)
    if generation:
        assert transformers.GenerationConfig.from_pretrained(folder).to_dict() == generation
    else:
        assert not (folder / "generation_config.json").exists()

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = dict(PUBLISHED[name].get("tokenizer_config.json", {"model_max_length": 16}))
    wanted["model_max_length"] = max(16, wanted["model_max_length"])
    for key in wanted.keys() - {"tokenizer_class", "legacy", "added_tokens_decoder", "clean_up_tokenization_spaces"}:
        assert getattr(tokenizer, key) == wanted[key], key
    assert tokenizer.chat_template == PUBLISHED[name].get("chat_template.jinja", wanted.get("chat_template"))
    if "pad_token_id" in PUBLISHED[name]["config.json"]:
        assert tokenizer.pad_token_id == after["pad_token_id"]


def test_a_branch_has_the_configuration_apart_from_what_it_changed(
    tmp_path: Path, import_published: Callable[..., Job], new_job: Callable[..., Job]
) -> None:
    parent = import_published("Llama 3.1, instruct", train__max_steps="1")
    train(parent, ALONE)
    branch = f'{{run = "{parent.run}", step = 1, data = "restart"}}'
    changes = {**LLAMA_3_1, "model__rope_theta": "1e6", "train__branch": branch, "train__max_steps": "2"}
    job = train_new(new_job, **changes)
    shutil.rmtree(parent.checkpoint_collection)

    before, after = PUBLISHED["Llama 3.1, instruct"]["config.json"], read(export(opened(job), tmp_path / "x"))

    assert after["rope_theta"] == after["rope_parameters"]["rope_theta"] == 1e6
    assert after["rope_scaling"] == {**SCALING, "rope_type": "llama3", "rope_theta": 1e6}
    same = before.keys() - {"rope_theta", "rope_scaling", "torch_dtype", "transformers_version"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_the_type_of_exported_weights_is_chosen_on_the_command_line_and_has_to_hold_them(
    tmp_path: Path,
    new_job: Callable[..., Job],
    import_published: Callable[..., Job],
    capfd: pytest.CaptureFixture[str],
) -> None:
    job, recipe = new_job(train__max_steps="1"), write_recipe(tmp_path)
    train(job, ALONE)

    for dtype, *options in (("float32",), ("float16", "--dtype=float16")):
        output = tmp_path / dtype
        code, printed = call_trainer(capfd, recipe, job.root, f"--output={output}", *options, command="export")
        assert code == 0, printed
        weights = safetensors.torch.load_file(output / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
        assert read(output)["dtype"] == read(output)["torch_dtype"] == dtype
    large = import_published("transformers 5", scale=1e6)
    with pytest.raises(RecipeError, match="float16"):
        export(opened(large), tmp_path / "large", dtype="float16")
    assert not (tmp_path / "large").exists()


def test_rows_of_padding_that_were_not_imported_are_cut_and_nxds_ranks_get_equal_parts(
    tmp_path: Path, new_job: Callable[..., Job]
) -> None:
    odd = {"tokenizer__train__vocab_size": "301", "model__vocab_size": "301", "model__padded_vocab_size": "310"}
    job = train_new(new_job, train__max_steps="1", **odd)

    folder = export(opened(job), tmp_path / "exported")
    nxd = export(opened(job), tmp_path / "nxd", NxdLayout(2, 2, qkv_linear=True))

    head = safetensors.torch.load_file(folder / "model.safetensors")["lm_head.weight"]
    assert (read(folder)["vocab_size"], len(head)) == (301, 301)
    parts = [torch.load(path, weights_only=True)["lm_head.weight"] for path in sorted(nxd.glob("model/*.pt"))]
    assert (read(nxd)["vocab_size"], [len(part) for part in parts]) == (302, [151, 151])
    assert torch.equal(torch.cat(parts)[:301], head)
    assert not parts[1][-1].any()


@pytest.mark.parametrize("content", ["[]", "{"])
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_a_damaged_configuration_is_named(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ArtifactError, match=file):
        read_imported(tmp_path)
