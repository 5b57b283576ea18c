"""A checkpoint is exported as a Hugging Face folder with the same logits, and with the configuration of its import."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from services.common.artifacts.checkpoint import shard_name
from services.common.artifacts.corpus import VocabularyKind
from services.common.errors import ArtifactError, RecipeError
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Model
from services.common.testing.disks import mounted
from services.common.vocabularies.codec import load_codec
from services.trainer.checkpoints.lookup import open_checkpoint
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.conversion.configuration import read_imported
from services.trainer.conversion.export import PROVENANCE, export
from services.trainer.conversion.hugging_face import WEIGHTS
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.conversion.weight_import import digest_weights, import_weights
from services.trainer.inspection.sample import TextGenerator, load_model, load_weights
from services.trainer.job import Job
from services.trainer.runs.run import Run, open_run, vocabulary_file
from services.trainer.tests.builders import LLAMA_3_1, QWEN_3, NewJob, train_here, train_new, write_recipe
from services.trainer.tests.evaluated import evaluate_here, target_losses
from services.trainer.tests.runs import call_trainer, flip_a_bit


@pytest.fixture(scope="module")
def trained(new_shared_job: NewJob) -> Job:
    """A run of one step."""
    return train_new(new_shared_job, train__max_steps="1")


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", LLAMA_3_1),
        ("LlamaForCausalLM", {"model__tie_word_embeddings": "true"}),
        ("Qwen3ForCausalLM", QWEN_3),
        ("Qwen3ForCausalLM", {**QWEN_3, "model__tie_word_embeddings": "false"}),
    ],
    ids=["2", "3.1", "tied", "Qwen3", "Qwen3, not tied"],
)
def test_an_exported_folder_gives_the_same_logits_through_from_pretrained(
    tmp_path: Path, new_job: NewJob, architecture: str, shape: dict[str, str]
) -> None:
    job = train_new(new_job, train__max_steps="1", **shape)
    run = open_run(job.root, job.run)
    folder = export(run, tmp_path / "hugging-face")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens_BS = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(theirs(tokens_BS).logits, load_model(run).logits(tokens_BS))
    assert (type(theirs).__name__, theirs.config.architectures) == (architecture, [architecture])
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (1, 2)
    ids = load_codec(vocabulary_file(run.corpus), run.corpus.manifest.corpus.vocabulary).encode("sentence 1 </s>")
    assert transformers.AutoTokenizer.from_pretrained(folder)("sentence 1 </s>").input_ids == [1, *ids]


def test_a_large_model_is_exported_in_several_files_and_an_index(
    trained: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.conversion.hugging_face.FILE_ELEMENTS", 5_000)
    run = open_run(trained.root, trained.run)
    folder = export(run, tmp_path / "hugging-face")

    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in load_weights(run).items())


def test_an_average_is_the_mean_of_the_last_checkpoints_and_names_them(tmp_path: Path, new_job: NewJob) -> None:
    job = train_new(new_job, train__max_steps="4", checkpoint__interval_steps="1", checkpoint__keep_latest="3")
    run = open_run(job.root, job.run)
    folder = export(run, tmp_path / "mean", average_last=3)

    kept = [open_checkpoint(job.checkpoint_collection, step) for step in (2, 3, 4)]
    shapes = parameter_shapes(run.recipe.model)
    parts = [ShardReader(checkpoint, shapes).read_weights(shapes) for checkpoint in kept]
    exported = safetensors.torch.load_file(folder / WEIGHTS)
    for name, weight in exported.items():
        assert torch.equal(weight, torch.stack([part[name].double() for part in parts]).mean(0).float()), name
    assert not torch.equal(exported["model.norm.weight"], parts[-1]["model.norm.weight"])
    assert json.loads((folder / PROVENANCE).read_text()) == {
        "run": job.run,
        "checkpoints": [
            {"step": each.manifest.checkpoint.step, "content_digest": each.manifest.content_digest} for each in kept
        ],
    }
    with pytest.raises(ArtifactError, match="2, 3, 4"):
        export(run, tmp_path / "more", average_last=4)
    flip_a_bit(kept[0].path / shard_name(0))
    with pytest.raises(ArtifactError, match="step-00000002"):
        export(run, tmp_path / "damaged", average_last=3)
    assert not (tmp_path / "damaged").exists()


def test_requests_that_cannot_be_exported_are_refused(
    trained: Job, tmp_path: Path, new_job: NewJob, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError, match=tmp_path.name):
        export(open_run(trained.root, trained.run), tmp_path)
    nxd = ("--format=nxd", "--tensor-parallel-size=1")
    for root, options, code in (
        (trained.root, ("--average-last=0",), 2),
        (trained.root, ("--average-last=2", *nxd), 2),
        (new_job().root, (), 3),  # has no checkpoint
    ):
        output = f"--output={tmp_path / 'x'}"
        recipe = trained.root.parent / "small.toml"
        assert call_trainer(capfd, recipe, root, output, *options, command="export")[0] == code
        assert not (tmp_path / "x").exists()


def test_a_full_disk_keeps_nothing_of_an_export(trained: Job, tmp_path: Path) -> None:
    run = open_run(trained.root, trained.run)
    for number, layout in enumerate((None, NxdLayout(1))):
        with mounted(tmp_path / str(number), "64k") as disk:
            with pytest.raises(OSError, match="No space") as full:
                export(run, disk / "model", layout)
            assert (full.value.errno, list(disk.iterdir())) == (errno.ENOSPC, [])


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [("sentencepiece", "300"), ("tokenizer_json", "300"), ("tiktoken", "512"), ("hugging_face", "300")],
)
def test_a_sample_continues_the_prompt_and_is_the_same_for_the_same_seed(
    new_job: NewJob, kind: VocabularyKind, vocab_size: str
) -> None:
    job = new_job(
        kind=kind, train__max_steps="1", model__vocab_size=vocab_size, tokenizer__train__vocab_size=vocab_size
    )
    train_here(job)
    run = open_run(job.root, job.run)
    prompt = "sentence 1 </s><|end_of_text|>"  # typed, so no end
    writer = TextGenerator(run)
    texts = [writer.generate(prompt, num_tokens=30, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0].startswith(prompt)
    assert texts[0] == texts[1] != texts[2]
    assert writer.generate("", num_tokens=30, temperature=1.0, seed=0)


def test_a_tokenizer_of_hugging_face_is_handed_on_and_back(tmp_path: Path, new_job: NewJob) -> None:
    """It has no BOS, and neither has the model's configuration."""
    job = train_new(new_job, kind="hugging_face", train__max_steps="1")
    run = open_run(job.root, job.run)
    folder = export(run, tmp_path / "hugging-face")

    given = vocabulary_file(run.corpus).parent
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in given.iterdir())
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id) == (None, 1)
    assert transformers.AutoTokenizer.from_pretrained(folder).bos_token is None
    with pytest.raises(RecipeError, match="initial_weights"):  # not refused for its tokenizer
        import_weights(job, folder)
    other = shutil.copytree(folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["!"], tokenizer["model"]["vocab"]["#"] = 4, 2
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RecipeError, match=r"tokenizer\] model"):
        import_weights(job, other)
    flip_a_bit(given / "tokenizer_config.json")
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json"):
        export(run, tmp_path / "again")


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
    "Qwen3": {
        "config.json": {
            **LLAMA,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "head_dim": 12,
            "max_position_embeddings": 32768,
            "max_window_layers": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
        },
        "generation_config.json": {"eos_token_id": 2, "max_new_tokens": 2048},
    },
    "rows of padding, one of them for a pad token": {
        "config.json": {**LLAMA, "vocab_size": 320, "pad_token_id": 300, "max_position_embeddings": 8},
        "tokenizer_config.json": {"pad_token": "<pad>", "added_tokens_decoder": {"300": PAD}, "model_max_length": 8},
    },
    "rows of padding, tied": {
        "config.json": {**LLAMA, "vocab_size": 320, "tie_word_embeddings": True, "max_position_embeddings": 8},
    },
}
RECIPES: dict[str, dict[str, str]] = {
    "Llama 3.1, instruct": LLAMA_3_1,
    "transformers 5": {"model__tie_word_embeddings": "true"},
    "Qwen3": QWEN_3,
    "rows of padding, one of them for a pad token": {"model__padded_vocab_size": "320"},
    "rows of padding, tied": {"model__padded_vocab_size": "320", "model__tie_word_embeddings": "true"},
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
def import_published(tmp_path: Path, new_job: NewJob) -> NewJob:
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
    tmp_path: Path, import_published: NewJob, name: str
) -> None:
    job, published = import_published(name, train__max_steps="1"), tmp_path / "published"
    before = transformers.AutoConfig.from_pretrained(published).to_dict() | {"_name_or_path": ""}
    generation = None
    if "generation_config.json" in PUBLISHED[name]:
        generation = transformers.GenerationConfig.from_pretrained(published).to_dict()
    theirs = safetensors.torch.load_file(published / "model.safetensors")
    untrained = export(opened(job), tmp_path / "untrained", dtype="bfloat16", keep_padding=True)
    ours = safetensors.torch.load_file(untrained / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[each]) for each, tensor in theirs.items())
    shutil.rmtree(published)
    train_here(job)
    shutil.rmtree(job.checkpoint_collection / "step-00000000")

    folder = export(opened(job), tmp_path / "exported", dtype="bfloat16", keep_padding=True)

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


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("rows of padding")])
def test_the_loss_in_transformers_is_the_run_s_though_the_model_had_rows_of_padding(
    tmp_path: Path, import_published: NewJob, name: str
) -> None:
    """A pad token in one of these rows goes with them."""
    job = import_published(name, scale=1.0, train__max_steps="1")
    train_here(job)

    losses = target_losses(job, tmp_path / "exported")

    assert evaluate_here(job, None, 10**6, **RECIPES[name]).loss == pytest.approx(losses.mean(), abs=1e-5)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "exported").pad_token_id is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert (len(tokenizer), tokenizer.pad_token) == (300, None)


def test_a_branch_has_the_configuration_apart_from_what_it_changed(
    tmp_path: Path, import_published: NewJob, new_job: NewJob
) -> None:
    parent = import_published("Llama 3.1, instruct", train__max_steps="1")
    train_here(parent)
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
    tmp_path: Path, new_job: NewJob, import_published: NewJob, capfd: pytest.CaptureFixture[str]
) -> None:
    job, recipe = new_job(train__max_steps="1"), write_recipe(tmp_path)
    train_here(job)

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


def test_rows_of_padding_are_cut_unless_asked_for_and_nxds_ranks_get_equal_parts(
    tmp_path: Path, new_job: NewJob
) -> None:
    odd = {"tokenizer__train__vocab_size": "301", "model__vocab_size": "301", "model__padded_vocab_size": "310"}
    job = train_new(new_job, train__max_steps="1", **odd)

    folder = export(opened(job), tmp_path / "exported")
    nxd = export(opened(job), tmp_path / "nxd", NxdLayout(2, 2, qkv_linear=True))
    whole = export(opened(job), tmp_path / "whole", keep_padding=True)

    head = safetensors.torch.load_file(folder / "model.safetensors")["lm_head.weight"]
    assert (read(folder)["vocab_size"], len(head)) == (301, 301)
    parts = [torch.load(path, weights_only=True)["lm_head.weight"] for path in sorted(nxd.glob("model/*.pt"))]
    assert (read(nxd)["vocab_size"], [len(part) for part in parts]) == (302, [151, 151])
    assert torch.equal(torch.cat(parts)[:301], head)
    assert not parts[1][-1].any()
    assert len(safetensors.torch.load_file(whole / "model.safetensors")["lm_head.weight"]) == 310


@pytest.mark.parametrize("content", ["[]", "{"])
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
def test_a_damaged_configuration_is_named(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ArtifactError, match=file):
        read_imported(tmp_path)
