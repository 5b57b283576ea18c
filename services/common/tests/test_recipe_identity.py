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

DECIDED = {
    "corpus compile_cache checkpoint": ("corpus.sequence_length",),
    "corpus": (
        *("corpus.sources", "corpus.rows_per_shard", "corpus.validation_fraction", "corpus.min_document_bytes"),
        *("corpus.duplicates", "corpus.invalid_utf8", "corpus.bad_rows", "corpus.control_text"),
        *("corpus.max_document_bytes", "tokenizer.model", "tokenizer.train"),
        *("tokenizer.bos_token", "tokenizer.eos_token"),
    ),
    "compile_cache checkpoint": (
        *("model", "parallel.reduce_dtype", "batch.micro_batch_size", "batch.loss_chunk_tokens"),
        *("train.dtype", "train.param_dtype", "train.attention_mask", "train.z_loss"),
    ),
    "compile_cache": (
        *("parallel.tensor_parallel_size", "parallel.threads_per_worker", "parallel.device", "compile.flags"),
        "train.activation_checkpointing",
    ),
    "checkpoint": (
        *("batch.global_batch_size", "optimizer.schedule", "optimizer.learning_rate", "optimizer.min_learning_rate"),
        *("optimizer.warmup_steps", "optimizer.warmup_begin_step", "optimizer.decay_steps", "optimizer.cooldown_steps"),
        *("optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "optimizer.weight_decay"),
        "optimizer.max_grad_norm",
        *("compile.enabled", "train.seed", "train.data_seed", "train.initial_weights", "train.branch"),
        *("train.reduction", "train.evaluation_tokens", "train.mixture"),
    ),
    "": (
        *("name", "corpus.name", "corpus.max_bad_rows", "corpus.split_bytes", "tokenizer.encoder"),
        *("tokenizer.num_workers", "tokenizer.keep_encoded", "parallel.data_parallel_size", "parallel.zero_stage"),
        *("compile.require_warm", "compile.trace_on", "compile.num_workers", "compile.task_cpus"),
        *("compile.task_memory_gib", "compile.task_timeout_seconds", "compile.task_attempts", "train.max_steps"),
        *("train.evaluation_interval_steps", "train.health_interval_steps", "train.time_limit_seconds"),
        *("train.max_consecutive_skipped_steps", "train.max_restarts", "train.watchdog_factor"),
        *("train.watchdog_min_seconds", "train.loss_spike_sigma", "train.loss_spike_window"),
        *("train.loss_spike_patience_steps", "train.loss_spike_rollback_steps", "train.loss_spike_max_rollbacks"),
        *("checkpoint.interval_steps", "checkpoint.memory_interval_steps"),
        *("checkpoint.keep_latest", "checkpoint.keep_interval_steps"),
        *("cluster.tokenizer_nodes", "cluster.compiler_nodes", "cluster.trainer_workers_per_node"),
        *("cluster.trainer_instance_type", "cluster.min_nodes", "notify.webhook", "notify.conditions"),
    ),
}
"""The fields of a recipe by the kinds of artifacts whose ids they decide."""


def test_every_field_decides_the_ids_that_are_written_here(tmp_path: Path) -> None:
    """A field of these four is no part of an id with its default, which gives the bytes of a recipe without it."""
    not_default = {
        "corpus.duplicates": "drop",
        "corpus.bad_rows": "skip",
        "corpus.max_document_bytes": "1000",
        "train.mixture": "{sentences = 1, code = 1}",
    }
    recipe = load_small(tmp_path, not_default)
    identities = {kind: identity(recipe, kind) for kind in KINDS}
    fields = [
        name if not isinstance(value, BaseModel) or name == "model" else f"{name}.{key}"
        for name, value in recipe
        for key in (type(value).model_fields if isinstance(value, BaseModel) and name != "model" else [""])
    ]

    found = {name: " ".join(kind for kind in KINDS if name in identities[kind]) for name in fields}

    assert found == {name: kinds for kinds, names in DECIDED.items() for name in names}
    assert identity(load_small(tmp_path, {}), "corpus").keys() == identities["corpus"].keys() - not_default.keys()


def changed_kinds(before: Recipe, after: Recipe) -> str:
    """The kinds of artifacts whose ids differ."""
    return " ".join(kind for kind in KINDS if artifact_id(before, kind, 1, []) != artifact_id(after, kind, 1, []))


BFLOAT16 = {"train.dtype": "bfloat16"}
BRANCH = {"train.branch.run": "small-01234567", "train.branch.step": "5"}


@pytest.mark.parametrize(
    ("base", "changed", "decided"),
    [
        ({}, {"corpus.sequence_length": "32"}, "corpus compile_cache checkpoint"),
        ({}, {"tokenizer.train.vocab_size": "400", "model.vocab_size": "400"}, "corpus compile_cache checkpoint"),
        ({}, {"corpus.sources": '[{ uri = "elsewhere" }]'}, "corpus"),
        ({}, {"corpus.duplicates": "drop"}, "corpus"),
        ({}, {"model.num_hidden_layers": "3"}, "compile_cache checkpoint"),
        (BFLOAT16, {"train.param_dtype": "bfloat16"}, "compile_cache checkpoint"),
        ({}, {"parallel.tensor_parallel_size": "2"}, "compile_cache"),
        ({}, {"parallel.zero_stage": "2"}, ""),
        ({}, {"parallel.zero_stage": "3"}, "compile_cache"),  # graphs of layers
        ({}, {"train.seed": "1"}, "checkpoint"),
        (BRANCH, {"train.branch.step": "6"}, "checkpoint"),
        (BRANCH, {"train.branch.data": "restart"}, "checkpoint"),
        ({}, {"train.max_steps": "21"}, ""),
        ({"optimizer.max_grad_norm": "2"}, {"optimizer.max_grad_norm": "2.0"}, ""),
        ({}, {"model.preset": "llama2-7b"}, ""),
        ({}, {"model.padded_vocab_size": "320"}, "compile_cache checkpoint"),
        ({}, {"model.padded_vocab_size": "300"}, ""),
        ({}, {"model.head_dim": "8"}, ""),  # the default
        ({}, {"model.head_dim": "16"}, "compile_cache checkpoint"),
        ({}, {"model.qk_norm": "true"}, "compile_cache checkpoint"),
    ],
)
def test_an_id_changes_with_the_fields_that_decide_it(
    tmp_path: Path, base: dict[str, str], changed: dict[str, str], decided: str
) -> None:
    assert changed_kinds(load_small(tmp_path, base), load_small(tmp_path, base | changed)) == decided


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


def test_a_model_without_them_has_the_identity_of_a_recipe_without_the_fields(tmp_path: Path) -> None:
    fields = identity(load_small(tmp_path, {}), "compile_cache")["model"]
    assert not fields.keys() & {"padded_vocab_size", "head_dim", "qk_norm"}


@pytest.mark.parametrize(("content_version", "inputs"), [(2, ["a"]), (1, ["b"]), (1, ["a", "b"])])
def test_an_id_depends_on_inputs_and_content_version(tmp_path: Path, content_version: int, inputs: list[str]) -> None:
    recipe = make_recipe(tmp_path)

    assert artifact_id(recipe, "corpus", content_version, inputs) != artifact_id(recipe, "corpus", 1, ["a"])
