"""An artifact's id depends on the recipe's marked fields, the inputs and the content version, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from services.common.artifacts.store import artifact_id
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.schema import Recipe, identity
from services.common.recipe.section import Kind
from services.common.testing.recipes import load_small, make_recipe

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
    "corpus.duplicates": ("drop", "corpus"),
    "corpus.invalid_utf8": ("reject", "corpus"),
    "corpus.bad_rows": ("skip", "corpus"),
    "corpus.max_bad_rows": ("7", ""),
    "corpus.max_document_bytes": ("1000", "corpus"),
    "corpus.split_bytes": ("1000", ""),
    "tokenizer.train.max_bytes": ("1000", "corpus"),
    "tokenizer.bos_token": ("<s>", "corpus"),
    "tokenizer.eos_token": ("</s>", "corpus"),
    "tokenizer.encoder": ("reference", ""),
    "tokenizer.num_workers": ("5", ""),
    "tokenizer.keep_encoded": ("true", ""),
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
    "optimizer.schedule": ("linear", "checkpoint"),
    "optimizer.beta1": ("0.8", "compile_cache checkpoint"),
    "optimizer.beta2": ("0.99", "compile_cache checkpoint"),
    "optimizer.epsilon": ("1e-6", "compile_cache checkpoint"),
    "optimizer.weight_decay": ("0", "compile_cache checkpoint"),
    "optimizer.max_grad_norm": ("2", "compile_cache checkpoint"),
    "compile.enabled": ("false", "checkpoint"),
    "compile.require_warm": ("true", ""),
    "compile.trace_on": ("cpu", ""),
    "compile.flags": ('["--model-type=transformer"]', "compile_cache"),
    "compile.num_workers": ("6", ""),
    "compile.task_cpus": ("7", ""),
    "compile.task_memory_gib": ("7.5", ""),
    "compile.task_timeout_seconds": ("7", ""),
    "compile.task_attempts": ("7", ""),
    "train.max_steps": ("21", ""),
    "train.seed": ("1", "checkpoint"),
    "train.data_seed": ("1", "checkpoint"),
    "train.dtype": ("bfloat16", "compile_cache checkpoint"),
    "train.attention_mask": ("block_causal", "compile_cache checkpoint"),
    "train.z_loss": ("1e-4", "compile_cache checkpoint"),
    "train.activation_checkpointing": ("full", "compile_cache"),
    "train.reduction": ("fast", "checkpoint"),
    "train.evaluation_interval_steps": ("7", ""),
    "train.health_interval_steps": ("7", ""),
    "train.evaluation_tokens": ("7", "checkpoint"),
    "train.initial_weights": ("0" * 64, "checkpoint"),
    "train.time_limit_seconds": ("7", ""),
    "train.max_consecutive_skipped_steps": ("7", ""),
    "train.max_restarts": ("7", ""),
    "train.watchdog_factor": ("7", ""),
    "train.watchdog_min_seconds": ("7", ""),
    "train.loss_spike_sigma": ("6", ""),
    "train.loss_spike_window": ("32", ""),
    "train.loss_spike_patience_steps": ("7", ""),
    "train.loss_spike_rollback_steps": ("7", ""),
    "train.loss_spike_max_rollbacks": ("7", ""),
    "checkpoint.interval_steps": ("7", ""),
    "model.padded_vocab_size": ("320", "compile_cache checkpoint"),
    "checkpoint.keep_latest": ("7", ""),
    "checkpoint.keep_interval_steps": ("7", ""),
    "cluster.tokenizer_nodes": ("7", ""),
    "cluster.compiler_nodes": ("7", ""),
    "cluster.min_nodes": ("7", ""),
    "notify.webhook": ("file:/run/secrets/webhook", ""),
    "notify.conditions": ('["done"]', ""),
    "cluster.trainer_instance_type": ("trn1.32xlarge", ""),
}
# Fields without another legal value of their own; those that change with another one have tests below.
NOT_ALONE = {
    "corpus.control_text",
    "parallel.reduce_dtype",
    "train.param_dtype",
    "cluster.trainer_workers_per_node",
    "tokenizer.model",
    "tokenizer.train",
    "tokenizer.train.vocab_size",
    "model.vocab_size",
    "train.branch.run",
    "train.branch.step",
    "train.branch.data",
    "optimizer.cooldown_steps",
    "optimizer.warmup_begin_step",
}


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


def test_every_field_is_either_tested_for_identity_or_excused() -> None:
    assert all_fields() == FIELDS.keys() | NOT_ALONE


def changed_kinds(before: Recipe, after: Recipe) -> str:
    """The kinds of artifacts whose ids differ."""
    return " ".join(kind for kind in KINDS if artifact_id(before, kind, 1, []) != artifact_id(after, kind, 1, []))


@pytest.mark.parametrize("key", FIELDS)
def test_an_id_changes_with_its_marked_fields_alone(tmp_path: Path, key: str) -> None:
    text, decided = FIELDS[key]
    before, after = load_small(tmp_path, {}), load_small(tmp_path, {key: text})

    assert before != after
    assert changed_kinds(before, after) == decided


BFLOAT16 = {"train.dtype": "bfloat16"}
WSD = {"optimizer.schedule": "wsd", "optimizer.cooldown_steps": "5"}
BRANCH = {"train.branch.run": "small-01234567", "train.branch.step": "5"}


@pytest.mark.parametrize(
    ("base", "changed", "decided"),
    [
        (BFLOAT16, {"train.param_dtype": "bfloat16"}, "compile_cache checkpoint"),
        (BFLOAT16, {"parallel.reduce_dtype": "bfloat16"}, "compile_cache checkpoint"),
        (WSD, {"optimizer.cooldown_steps": "6"}, "checkpoint"),
        (BRANCH, {"train.branch.run": "other-01234567"}, "checkpoint"),
        (BRANCH, {"train.branch.step": "6"}, "checkpoint"),
        (BRANCH, {"train.branch.data": "restart"}, "checkpoint"),
        (BRANCH, {"optimizer.warmup_begin_step": "5"}, "checkpoint"),
        ({}, {"tokenizer.train.vocab_size": "400", "model.vocab_size": "400"}, "corpus compile_cache checkpoint"),
        ({"parallel.data_parallel_size": "4"}, {"cluster.trainer_workers_per_node": "2"}, ""),
        ({"optimizer.max_grad_norm": "2"}, {"optimizer.max_grad_norm": "2.0"}, ""),
        ({}, {"model.padded_vocab_size": "300"}, ""),
    ],
)
def test_fields_that_change_with_others_decide_these_ids(
    tmp_path: Path, base: dict[str, str], changed: dict[str, str], decided: str
) -> None:
    assert changed_kinds(load_small(tmp_path, base), load_small(tmp_path, base | changed)) == decided


def test_a_corpus_that_keeps_its_duplicates_has_the_id_of_a_recipe_without_the_field(tmp_path: Path) -> None:
    """Corpora keep their ids when a field is added whose default changes no byte."""
    kept, dropped = (load_small(tmp_path, {"corpus.duplicates": choice}) for choice in ("keep", "drop"))

    assert load_small(tmp_path, {}) == kept
    assert "corpus.duplicates" not in identity(kept, "corpus")
    assert identity(dropped, "corpus") == {**identity(kept, "corpus"), "corpus.duplicates": "drop"}


def test_the_seed_of_the_data_is_that_of_the_weights_unless_it_is_given(tmp_path: Path) -> None:
    both, named = (
        load_small(tmp_path, {"train.seed": "3"}),
        load_small(tmp_path, {"train.seed": "3", "train.data_seed": "3"}),
    )

    assert both == named
    assert load_small(tmp_path, {"train.seed": "3", "train.data_seed": "0"}).train.data_seed == 0


def test_a_preset_and_its_values_written_out_are_one_identity(tmp_path: Path) -> None:
    sizes = MODEL_PRESETS["llama2-7b"]
    vocabulary = {"tokenizer.train.vocab_size": str(sizes["vocab_size"])}

    by_preset = load_small(tmp_path, vocabulary, model=None, model__preset="llama2-7b")
    written_out = load_small(tmp_path, vocabulary, model=None, **{f"model__{key}": size for key, size in sizes.items()})

    assert identity(by_preset, "checkpoint") == identity(written_out, "checkpoint")


def test_a_model_without_padding_has_the_identity_of_a_recipe_without_the_field(tmp_path: Path) -> None:
    assert "padded_vocab_size" not in identity(load_small(tmp_path, {}), "compile_cache")["model"]


@pytest.mark.parametrize(("content_version", "inputs"), [(2, ["a"]), (1, ["b"]), (1, ["a", "b"])])
def test_an_id_depends_on_inputs_and_content_version(tmp_path: Path, content_version: int, inputs: list[str]) -> None:
    recipe = make_recipe(tmp_path)

    assert artifact_id(recipe, "corpus", content_version, inputs) != artifact_id(recipe, "corpus", 1, ["a"])
