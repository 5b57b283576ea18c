"""A recipe is checked before anything runs, and its identity is what ids are made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.lease import hold_lease
from services.common.artifacts.store import LOCK_SUFFIX, Address, artifact_id, find_artifact, publish_once
from services.common.errors import RecipeError
from services.common.process.command_line import StageParser
from services.common.recipe.derived import derive, describe
from services.common.recipe.file import load_recipe
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.schema import MAX_NAME_LENGTH, Cluster, Identity, Kind, Model, Recipe, identity, stage_nodes
from services.common.testing.artifacts import fill
from services.common.testing.recipes import make_recipe, write_recipe

KINDS: tuple[Kind, ...] = ("corpus", "compile_cache", "checkpoint")

# For every field that an override can change: another legal value, and the kinds whose id it decides.
FIELDS: dict[str, tuple[str, str]] = {
    "name": ("other", ""),
    "corpus.name": ("other", ""),
    "corpus.sources": ('[{ uri = "elsewhere" }]', "corpus"),
    "corpus.sequence_length": ("32", "corpus compile_cache checkpoint"),
    "corpus.rows_per_shard": ("7", "corpus"),
    "corpus.validation_fraction": ("0.5", "corpus"),
    "corpus.min_document_bytes": ("7", "corpus"),
    "corpus.invalid_utf8": ("reject", "corpus"),
    "corpus.max_document_bytes": ("1000", ""),
    "corpus.split_bytes": ("1000", ""),
    "tokenizer.train.max_bytes": ("1000", "corpus"),
    "tokenizer.bos_token": ("<s>", "corpus"),
    "tokenizer.eos_token": ("</s>", "corpus"),
    "tokenizer.encoder": ("reference", ""),
    "tokenizer.num_workers": ("5", ""),
    "model.preset": ("llama2-7b", ""),
    "model.hidden_size": ("32", "compile_cache checkpoint"),
    "model.intermediate_size": ("64", "compile_cache checkpoint"),
    "model.num_hidden_layers": ("3", "compile_cache checkpoint"),
    "model.num_attention_heads": ("4", "compile_cache checkpoint"),
    "model.num_key_value_heads": ("2", "compile_cache checkpoint"),
    "model.rms_norm_eps": ("1e-6", "compile_cache checkpoint"),
    "model.rope_theta": ("5e5", "compile_cache checkpoint"),
    "model.rope_scaling": (
        "{ factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 16 }",
        "compile_cache checkpoint",
    ),
    "model.tie_word_embeddings": ("true", "compile_cache checkpoint"),
    "model.initializer_range": ("0.1", "compile_cache checkpoint"),
    "parallel.data_parallel_size": ("2", ""),
    "parallel.tensor_parallel_size": ("2", "compile_cache"),
    "parallel.zero_stage": ("1", ""),
    "parallel.threads_per_worker": ("2", "compile_cache"),
    "parallel.device": ("cuda", "compile_cache"),
    "batch.micro_batch_size": ("4", "compile_cache checkpoint"),
    "batch.global_batch_size": ("16", "checkpoint"),
    "batch.loss_chunk_tokens": ("8", "compile_cache checkpoint"),
    "optimizer.learning_rate": ("0.5", "checkpoint"),
    "optimizer.min_learning_rate": ("0", "checkpoint"),
    "optimizer.warmup_steps": ("3", "checkpoint"),
    "optimizer.decay_steps": ("30", "checkpoint"),
    "optimizer.beta1": ("0.8", "compile_cache checkpoint"),
    "optimizer.beta2": ("0.99", "compile_cache checkpoint"),
    "optimizer.epsilon": ("1e-6", "compile_cache checkpoint"),
    "optimizer.weight_decay": ("0", "compile_cache checkpoint"),
    "optimizer.max_grad_norm": ("2", "compile_cache checkpoint"),
    "compile.enabled": ("false", "checkpoint"),
    "compile.require_warm": ("true", ""),
    "compile.trace_on": ("cpu", ""),
    "compile.flags": ('["--model-type=transformer"]', "compile_cache"),
    "compile.num_workers": ("7", ""),
    "compile.task_cpus": ("7", ""),
    "compile.task_memory_gib": ("7.5", ""),
    "compile.task_timeout_seconds": ("7", ""),
    "compile.task_attempts": ("7", ""),
    "train.max_steps": ("21", ""),
    "train.seed": ("1", "checkpoint"),
    "train.dtype": ("bfloat16", "compile_cache checkpoint"),
    "train.attention_mask": ("block_causal", "compile_cache checkpoint"),
    "train.z_loss": ("1e-4", "compile_cache checkpoint"),
    "train.activation_checkpointing": ("full", "compile_cache"),
    "train.reduction": ("fast", "checkpoint"),
    "train.evaluation_interval_steps": ("7", ""),
    "train.evaluation_batches": ("7", ""),
    "train.initial_weights": ("0" * 64, "checkpoint"),
    "train.time_limit_seconds": ("7", ""),
    "train.max_consecutive_skipped_steps": ("7", ""),
    "train.max_restarts": ("7", ""),
    "train.watchdog_factor": ("7", ""),
    "train.watchdog_min_seconds": ("7", ""),
    "train.loss_spike_sigma": ("6", "checkpoint"),
    "train.loss_spike_window": ("7", "checkpoint"),
    "checkpoint.interval_steps": ("7", ""),
    "checkpoint.keep_latest": ("7", ""),
    "checkpoint.keep_interval_steps": ("7", ""),
    "cluster.tokenizer_nodes": ("7", ""),
    "cluster.compiler_nodes": ("7", ""),
    "cluster.min_nodes": ("7", ""),
    "cluster.trainer_instance_type": ("trn1.32xlarge", ""),
}
# control_text has one legal value; the vocabulary's fields change together, those of the nodes, and the types (below).
NOT_ALONE = {
    "corpus.control_text",
    "parallel.reduce_dtype",
    "train.param_dtype",
    "cluster.trainer_workers_per_node",
    "tokenizer.model",
    "tokenizer.train",
    "tokenizer.train.vocab_size",
    "model.vocab_size",
}


def load(folder: Path, overrides: dict[str, str], **changes: Any) -> Recipe:
    return load_recipe(write_recipe(folder, **changes), overrides)


def all_fields(section: type[BaseModel] = Recipe, prefix: str = "") -> set[str]:
    names = set()
    for name, field in section.model_fields.items():
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        nested = [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
        if nested and name not in {"sources", "rope_scaling"}:
            names |= all_fields(nested[0], f"{prefix}{name}.")
            if name != "train" or not prefix:
                continue
        names.add(prefix + name)
    return names


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)

    assert (recipe.name, recipe.optimizer.learning_rate, recipe.corpus.rows_per_shard) == ("small", 1e-2, 32_768)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.max_steps", "500", 500),
        ("optimizer.learning_rate", "3e-2", 3e-2),
        ("optimizer.weight_decay", "0", 0.0),
        ("compile.enabled", "false", False),
        ("corpus.name", "other-corpus", "other-corpus"),
        ("corpus.name", '"quoted"', "quoted"),
        ("checkpoint.keep_interval_steps", "50", 50),
    ],
)
def test_an_override_beats_the_file(tmp_path: Path, key: str, text: str, expected: object) -> None:
    value = load(tmp_path, {key: text})
    for part in key.split("."):
        value = getattr(value, part)

    assert value == expected
    assert type(value) is type(expected)


def test_the_environment_is_never_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_recipe(tmp_path)
    for name in ("NAME", "name", "TRAIN__MAX_STEPS", "MILLRACE_NAME", "train.max_steps", "MAX_STEPS"):
        monkeypatch.setenv(name, "999")

    assert make_recipe(tmp_path) == before


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train.max_step", "unknown key 'train.max_step'. Did you mean 'train.max_steps'?"),
        ("trian.max_steps", "unknown key 'trian'. Did you mean 'train'?"),
        ("model.max_steps", "unknown key 'model.max_steps'. Did you mean 'train.max_steps'?"),
        ("tokenizer.train.vocab_sizes", "Did you mean 'tokenizer.train.vocab_size'?"),
        ("compile.zzz", "unknown key 'compile.zzz'. Known here: enabled, require_warm, trace_on, "),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, {key: "1"})

    assert message in str(caught.value)
    assert str(tmp_path / "small.toml") in str(caught.value)


def test_an_unknown_key_of_a_source_names_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown key 'corpus.sources.0.url'. Did you mean 'corpus.sources.0.uri'\?"):
        load(tmp_path, {"corpus.sources": '[{ url = "nowhere" }]'})


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.max_steps", '"500"', "train.max_steps: got '500', expected: a valid integer"),
        ("train.max_steps", "5.5", "train.max_steps: got 5.5, expected: a valid integer"),
        ("train.max_steps", "0", "train.max_steps: got 0, expected: greater than 0"),
        ("compile.enabled", "1", "compile.enabled: got 1, expected: a valid boolean"),
        ("corpus.name", "2024", "corpus.name: got 2024, expected: a valid string"),
        ("corpus.name", "../up", "corpus.name: got '../up', expected:"),
        ("corpus.validation_fraction", "1", "expected: less than 1"),
        ("optimizer.learning_rate", "inf", "optimizer.learning_rate: got inf, expected: a finite number"),
        ("optimizer.learning_rate", "nan", "optimizer.learning_rate: got nan, expected: a finite number"),
        ("train.z_loss", "-1e-4", "train.z_loss: got -0.0001, expected: greater than or equal to 0"),
        ("train.dtype", "float16", "train.dtype: got 'float16', expected: 'float32' or 'bfloat16'"),
        ("model.preset", '["llama2-7b"]', "model.preset: got ['llama2-7b'], expected: a valid string"),
        ("corpus.sources", "[]", "corpus.sources: got [], expected:"),
        ("corpus.sources.uri", "x", "--corpus.sources.uri: sources is a value, not a section."),
    ],
)
def test_a_value_of_the_wrong_kind_is_shown_with_what_was_expected(
    tmp_path: Path, key: str, text: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, {key: text})

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch.global_batch_size": "7"}, "batch.global_batch_size 7 must be a multiple of batch.micro_batch_size 2"),
        ({"parallel.data_parallel_size": "3"}, "4 micro-batches per step .* parallel.data_parallel_size 3"),
        (
            {"parallel.device": "xla"},
            "'xla' needs compile.enabled = true and train.reduction = 'fast'",
        ),
        (
            {"parallel.device": "xla", "train.reduction": "fast", "cluster.min_nodes": "1"},
            "cluster.min_nodes 1 cannot be with parallel.device 'xla'",
        ),
        (
            {"parallel.device": "xla", "train.reduction": "fast", "cluster.trainer_instance_type": "trn2.48xlarge"},
            "is a NeuronCore of trn1, and cluster.trainer_instance_type is trn2.48xlarge, whose cores take 'neuron'",
        ),
        (
            {"parallel.device": "cuda", "cluster.trainer_instance_type": "trn2.48xlarge"},
            "'cuda' is one of a node's GPUs, and cluster.trainer_instance_type trn2.48xlarge has NeuronCores",
        ),
        (
            {"parallel.device": "neuron", "cluster.trainer_instance_type": "p5.48xlarge"},
            "'neuron' is one of a node's NeuronCores, and cluster.trainer_instance_type p5.48xlarge has GPUs",
        ),
        (
            {"parallel.device": "xla", "train.reduction": "fast", "cluster.trainer_instance_type": "p5.48xlarge"},
            "'xla' is one of a node's NeuronCores, and cluster.trainer_instance_type p5.48xlarge has GPUs",
        ),
        ({"batch.global_batch_size": "12", "parallel.data_parallel_size": "3"}, "needs a power of two of them, got 6"),
        (
            {"parallel.data_parallel_size": "4", "cluster.trainer_workers_per_node": "3"},
            "the 4 workers .* must be a multiple of cluster.trainer_workers_per_node 3",
        ),
        (
            {"parallel.data_parallel_size": "2", "cluster.trainer_workers_per_node": "4"},
            "the 2 workers .* must be a multiple of cluster.trainer_workers_per_node 4",
        ),
        ({"tokenizer.train.vocab_size": "301"}, "tokenizer.train.vocab_size 301 and model.vocab_size 300 differ"),
        ({"optimizer.min_learning_rate": "1"}, "optimizer.min_learning_rate 1.0 exceeds optimizer.learning_rate 0.01"),
        ({"optimizer.warmup_steps": "20"}, "optimizer.warmup_steps 20 must be below optimizer.decay_steps 20"),
        ({"tokenizer.model": "a.model"}, "give exactly one of tokenizer.model"),
        ({"model.num_attention_heads": "3"}, "hidden_size 16 must be an even multiple of num_attention_heads 3"),
        ({"model.num_attention_heads": "16"}, "hidden_size 16 must be an even multiple of num_attention_heads 16"),
        (
            {"model.num_attention_heads": "4", "model.num_key_value_heads": "3"},
            "num_attention_heads 4 must be a multiple of num_key_value_heads 3",
        ),
        ({"train.param_dtype": "bfloat16"}, "train.param_dtype 'bfloat16' needs train.dtype 'bfloat16', got 'float32'"),
        (
            {"parallel.reduce_dtype": "bfloat16"},
            "parallel.reduce_dtype 'bfloat16' needs train.dtype 'bfloat16', got 'float32'",
        ),
        ({"compile.flags": '["--model-type transformer"]'}, "'--model-type transformer' is no flag: write each as one"),
        ({"compile.flags": '["O1"]'}, "'O1' is no flag"),
        ({"compile.flags": '["--target=trn1"]'}, "--target is the compiler stage's to set"),
        ({"compile.flags": '["--cache_dir=/tmp"]'}, "--cache_dir is for libneuronxla and no flag of neuronx-cc"),
        ({"model.preset": "llama9"}, "unknown preset 'llama9'; known: llama2-7b, llama2-13b, llama3-8b, llama3.1-8b"),
    ],
)
def test_sections_that_disagree_are_refused_with_both_values(
    tmp_path: Path, overrides: dict[str, str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, overrides)


def test_the_fast_reduction_takes_any_number_of_micro_batches(tmp_path: Path) -> None:
    overrides = {"batch.global_batch_size": "12", "parallel.data_parallel_size": "3", "train.reduction": "fast"}

    assert load(tmp_path, overrides).batch.num_micro_batches == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name = ", "not a TOML file"),
        (b"\xff", "not a TOML file"),
        (b"x = " + b"[" * 5_000 + b"]" * 5_000, "not a TOML file: nested deeper than 64"),
        (b"x = " + b"[" * 100 + b"]" * 100, "not a TOML file: nested deeper than 64"),
        (b".".join([b"a"] * 3_000) + b" = 1", "not a TOML file: nested deeper than 64"),
        (b"x = " + b"9" * 5_000, "not a TOML file: Exceeds the limit"),
        (b"x = 0x" + b"f" * 5_000, "not a TOML file: an integer of 20,000 bits"),
        (b"#" * (2**20 + 1), "1,048,577 bytes, expected at most 1,048,576"),
        (b"", "name: missing. Every recipe needs it"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)

    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.toml", "no such recipe"),
        (".", "cannot be read: a folder, expected a regular file"),
        ("small.toml/x", "cannot be read: Not a directory"),
        ("pipe", "cannot be read: a "),
        ("/dev/zero", "cannot be read: a "),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("x" * 256, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: no name of a file"),
        ("\ud800", "cannot be read: no name of a file"),
    ],
)
def test_a_path_that_cannot_be_read_is_a_recipe_error(tmp_path: Path, name: str, message: str) -> None:
    write_recipe(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.max_steps", "9" * 5_000, "--train.max_steps: cannot be read: Exceeds the limit"),
        ("train.max_steps", "0x" + "f" * 5_000, "--train.max_steps: cannot be read: an integer of 20,000 bits"),
        ("train.max_steps", str(2**63), "train.max_steps: an integer of more than 64 bits"),
        ("train.max_steps", "1e999", "train.max_steps: got inf, expected"),
        ("optimizer.learning_rate", "1e999", "optimizer.learning_rate: got inf, expected"),
        ("optimizer.learning_rate", "nan", "optimizer.learning_rate: got nan, expected"),
        ("corpus.sources", "[" * 5_000, "--corpus.sources: cannot be read: nested deeper than 64"),
        ("model.vocab_size", '"' + "x" * 100_000 + '"', "model.vocab_size: got 'xxx"),
        ("corpus.sources", "[1" + ", 1" * 1_000 + "]", "and 991 more"),
        ("corpus.sources", "[" + "1, " * 10_001 + "]", "corpus: sources: 10,001 entries, expected at most 10,000"),
        ("corpus.sources", '[{ uri = "a\\u0000b" }]', r"corpus.sources.0.uri: 'a\\x00b' has a NUL character"),
        ("tokenizer.model", "a\0b", r"tokenizer.model: 'a\\x00b' has a NUL character"),
        ("tokenizer.model", "\udcff", "--tokenizer.model: cannot be read"),
        ("model." + "a." * 3_000 + "b", "1", "cannot be read: nested deeper than 64"),
        ("..", "1", "unknown key"),
        ("train.", "1", "unknown key 'train.'"),
        ("name.x", "1", "name is a value, not a section"),
        ("\0.x", "1", "unknown key"),
    ],
)
def test_an_override_that_no_recipe_can_hold_is_a_recipe_error(
    tmp_path: Path, key: str, text: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load(tmp_path, {key: text})

    assert len(str(caught.value)) < 8_000


@pytest.mark.parametrize("key", ["name", "corpus.name"])
def test_the_longest_name_leaves_room_for_what_is_added_to_it(tmp_path: Path, key: str) -> None:
    assert load(tmp_path, {key: "n" * MAX_NAME_LENGTH})

    with pytest.raises(RecipeError, match=f"{key}: got 'nnn.*, expected: String should have at most 128 characters"):
        load(tmp_path, {key: "n" * (MAX_NAME_LENGTH + 1)})


def test_the_longest_name_can_be_published_and_found(tmp_path: Path) -> None:
    recipe = load(tmp_path, {"name": "n" * MAX_NAME_LENGTH, "corpus.name": "n" * MAX_NAME_LENGTH})
    address = Address(tmp_path / "fsx", "compile_cache", recipe.name, "0" * 16)

    publish_once(address, CompileCacheManifest, "compiler", recipe, fill)

    assert find_artifact(address.root, "compile_cache", recipe.name, recipe, CompileCacheManifest, "").path.exists()
    (address.root / "run").mkdir()
    with hold_lease(address.root / "run" / f"{recipe.name}-01234567{LOCK_SUFFIX}"):  # the trainer's
        pass


# The published sizes, of these repositories' config.json: meta-llama/Llama-2-7b-hf, -13b-hf, Meta-Llama-3-8B, 3.1-8B.
@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-8b", 8_030_261_248),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    assert Model.model_validate({"preset": preset}).num_parameters == parameters


def test_a_key_beside_a_preset_overrides_it() -> None:
    model = Model.model_validate({"preset": "llama2-7b", "num_hidden_layers": 2})

    assert (model.num_hidden_layers, model.hidden_size) == (2, 4096)


def test_every_field_is_either_tested_for_identity_or_excused() -> None:
    assert all_fields() == FIELDS.keys() | NOT_ALONE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", FIELDS)
def test_an_id_changes_with_its_marked_fields_alone(tmp_path: Path, key: str, kind: Kind) -> None:
    text, decided = FIELDS[key]
    before, after = load(tmp_path, {}), load(tmp_path, {key: text})
    assert before != after

    is_changed = artifact_id(before, kind, 1, []) != artifact_id(after, kind, 1, [])

    assert is_changed == (kind in decided.split())


def test_a_field_that_came_later_leaves_the_ids_of_before_alone_at_its_default(tmp_path: Path) -> None:
    added = {
        "train.param_dtype",
        "train.attention_mask",
        "train.z_loss",
        "parallel.device",
        "parallel.reduce_dtype",
    }

    assert all(added.isdisjoint(identity(load(tmp_path, {}), kind)) for kind in KINDS)


def test_the_vocabulary_decides_the_corpus_and_the_program(tmp_path: Path) -> None:
    before = load(tmp_path, {})
    after = load(tmp_path, {"tokenizer.train.vocab_size": "400", "model.vocab_size": "400"})

    assert all(identity(before, kind) != identity(after, kind) for kind in KINDS)


@pytest.mark.parametrize("key", ["train.param_dtype", "parallel.reduce_dtype"])
def test_the_type_of_weights_and_of_sums_decides_the_program_and_the_run(tmp_path: Path, key: str) -> None:
    before = load(tmp_path, {"train.dtype": "bfloat16"})
    after = load(tmp_path, {"train.dtype": "bfloat16", key: "bfloat16"})

    changed = [kind for kind in KINDS if identity(before, kind) != identity(after, kind)]

    assert changed == ["compile_cache", "checkpoint"]


def test_a_preset_and_its_values_written_out_are_one_identity(tmp_path: Path) -> None:
    sizes = MODEL_PRESETS["llama2-7b"]
    vocabulary = {"tokenizer.train.vocab_size": str(sizes["vocab_size"])}

    by_preset = load(tmp_path, vocabulary, model=None, model__preset="llama2-7b")
    written_out = load(tmp_path, vocabulary, model=None, **{f"model__{key}": size for key, size in sizes.items()})

    assert identity(by_preset, "checkpoint") == identity(written_out, "checkpoint")


def test_an_integer_written_for_a_real_number_is_the_same_identity(tmp_path: Path) -> None:
    one, other = load(tmp_path, {"optimizer.max_grad_norm": "2"}), load(tmp_path, {"optimizer.max_grad_norm": "2.0"})

    assert artifact_id(one, "checkpoint", 1, []) == artifact_id(other, "checkpoint", 1, [])


@pytest.mark.parametrize(("content_version", "inputs"), [(2, ["a"]), (1, ["b"]), (1, ["a", "b"])])
def test_an_id_depends_on_inputs_and_content_version(tmp_path: Path, content_version: int, inputs: list[str]) -> None:
    recipe = make_recipe(tmp_path)

    assert artifact_id(recipe, "corpus", content_version, inputs) != artifact_id(recipe, "corpus", 1, ["a"])


def test_every_identity_mark_names_known_kinds() -> None:
    def marks(section: type[BaseModel]) -> list[Identity]:
        found = []
        for field in section.model_fields.values():
            found += [mark for mark in field.metadata if isinstance(mark, Identity)]
            for each in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                if isinstance(each, type) and issubclass(each, BaseModel):
                    found += marks(each)
        return found

    assert {kind for mark in marks(Recipe) for kind in mark.kinds} == set(KINDS)


def test_the_command_line_overrides_the_recipe(tmp_path: Path) -> None:
    parser = StageParser("trainer", "Train.")

    arguments, recipe = parser.parse(["--recipe", str(write_recipe(tmp_path)), "--train.max_steps=7", "--root=data"])

    assert recipe.train.max_steps == 7
    assert arguments.root == Path.cwd() / "data"


@pytest.mark.parametrize("wrong", ["--train.max_steps", "train.max_steps=7", "--max_steps=7", "--rec=x"])
def test_what_the_command_line_does_not_know_is_a_recipe_error(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(RecipeError, match=r"a recipe override reads --section.key=value"):
        StageParser("trainer", "Train.").parse(["--recipe", str(write_recipe(tmp_path)), wrong])


@pytest.mark.parametrize("option", ["--root", "--recipe", "--prompt"])
@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_text_that_is_not_utf_8_is_a_recipe_error(tmp_path: Path, option: str, text: str) -> None:
    parser = StageParser("trainer", "Train.")
    parser.add_argument("--prompt")

    with pytest.raises(RecipeError, match=rf"{option.removeprefix('--')} '.*': expected UTF-8 without NUL characters"):
        parser.parse(["--recipe", str(write_recipe(tmp_path)), option, text])


def test_a_command_line_without_a_recipe_is_a_recipe_error() -> None:
    with pytest.raises(RecipeError, match="--recipe"):
        StageParser("trainer", "Train.").parse([])


def test_derived_numbers_follow_from_the_recipe(tmp_path: Path) -> None:
    rows = derive(make_recipe(tmp_path, parallel__data_parallel_size="2"), None)

    assert rows["tokens per step"] == "128"
    assert rows["tokens in max_steps"] == "2,560"
    assert rows["micro-batches per step"] == "4 (2 per worker)"


@pytest.mark.parametrize(("workers_per_node", "nodes"), [("1", 4), ("2", 2), ("4", 1)])
def test_the_trainers_nodes_follow_from_its_workers(tmp_path: Path, workers_per_node: str, nodes: int) -> None:
    workers = {"parallel.data_parallel_size": "4"}
    one = load(tmp_path, workers)
    other = load(tmp_path, {**workers, "cluster.trainer_workers_per_node": workers_per_node})

    assert stage_nodes(other, "trainer") == nodes
    assert derive(other, None)["nodes on a cluster"] == f"tokenizer 1, compiler 1, trainer {nodes}"
    assert all(artifact_id(one, kind, 1, []) == artifact_id(other, kind, 1, []) for kind in KINDS)


def test_the_compilers_nodes_are_said_or_follow_from_its_tasks(tmp_path: Path) -> None:
    tasks = {"compile.num_workers": "8", "parallel.device": "xla", "train.reduction": "fast"}

    assert "compiler as many as 8 tasks fill," in derive(load(tmp_path, tasks), None)["nodes on a cluster"]
    said = load(tmp_path, tasks | {"cluster.compiler_nodes": "1"})
    assert "compiler 1," in derive(said, None)["nodes on a cluster"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ()),
        ({"cluster.min_nodes": "1"}, (4, 2, 1)),
        ({"cluster.min_nodes": "3"}, (4,)),
        ({"cluster.min_nodes": "8"}, ()),
        ({"cluster.min_nodes": "1", "cluster.trainer_workers_per_node": "4"}, (1,)),
        ({"cluster.min_nodes": "1", "batch.global_batch_size": "24", "train.reduction": "fast"}, (6, 4, 3, 2, 1)),
        # On one machine, and with fewer NODES, a recipe of a large cluster is as legal as before.
        ({"cluster.min_nodes": "4", "parallel.data_parallel_size": "1"}, ()),
    ],
)
def test_a_gang_that_lost_a_node_goes_on_with_as_many_as_share_the_batch(
    tmp_path: Path, overrides: dict[str, str], expected: tuple[int, ...]
) -> None:
    eight = {"batch.micro_batch_size": "2", "batch.global_batch_size": "16", "parallel.data_parallel_size": "8"}
    if overrides.get("train.reduction") == "fast":
        eight |= {"parallel.data_parallel_size": "12"}

    recipe = load(tmp_path, eight | overrides)
    workers, micro_batches = recipe.parallel.data_parallel_size, recipe.batch.num_micro_batches

    assert recipe.cluster.fewer_nodes(workers, 1, micro_batches) == expected


def test_a_gang_of_split_models_goes_on_with_whole_ones(tmp_path: Path) -> None:
    cluster = Cluster(trainer_workers_per_node=2, min_nodes=1)

    assert cluster.fewer_nodes(num_workers=16, tensor_parallel_size=4, num_micro_batches=8) == (4, 2)
    assert cluster.fewer_nodes(num_workers=16, tensor_parallel_size=1, num_micro_batches=8) == (4, 2, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model.num_attention_heads": "4"},
            "model.num_attention_heads 4 cannot be shared by.*Possible sizes: 1, 2, 4$",
        ),
        ({"model.num_key_value_heads": "1", "model.intermediate_size": "100"}, "model.intermediate_size 100 cannot"),
        ({"corpus.sequence_length": "12"}, "corpus.sequence_length 12 cannot be shared by"),
        (
            {"model.num_attention_heads": "24", "model.num_key_value_heads": "3"},
            "model.num_key_value_heads 3 and.*sizes: 1$",
        ),
    ],
)
def test_tensor_parallel_workers_need_equal_parts_of_everything(
    tmp_path: Path, overrides: dict[str, str], message: str
) -> None:
    eight = {"model.hidden_size": "96", "model.intermediate_size": "96", "parallel.tensor_parallel_size": "8"}
    heads = {"model.num_attention_heads": "8", "model.num_key_value_heads": "2"}
    heads |= {"model.vocab_size": "304", "tokenizer.train.vocab_size": "304"}
    assert load(tmp_path, {**eight, **heads}).parallel.num_workers == 8

    with pytest.raises(RecipeError, match=message):
        load(tmp_path, {**eight, **heads, **overrides})


def test_a_run_keeps_its_name_at_every_tensor_parallel_degree(tmp_path: Path) -> None:
    one, two = load(tmp_path, {}), load(tmp_path, {"parallel.tensor_parallel_size": "2"})

    assert identity(one, "checkpoint") == identity(two, "checkpoint")
    assert identity(one, "checkpoint")["parallel.tensor_parallel_size"] == 1  # as runs have it that know no other
    assert identity(one, "compile_cache") != identity(two, "compile_cache")


def test_a_dry_run_shows_the_resolved_recipe(tmp_path: Path) -> None:
    shown = describe(make_recipe(tmp_path), None)

    assert '"rows_per_shard": 32768' in shown
    assert "steps per epoch" in shown
