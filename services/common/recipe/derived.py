"""What follows from a recipe: the numbers that `--dry-run` prints before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from services.common.artifacts.corpus import CorpusPayload
from services.common.hardware.image_platform import BACKENDS
from services.common.recipe.memory_estimate import checkpoint_bytes, memory_of_worker, micro_batches_per_model
from services.common.recipe.schema import STAGES, Recipe, Stage, stage_nodes


def describe(recipe: Recipe, corpus: CorpusPayload | None, known: Mapping[str, str] | None = None) -> str:
    """The resolved recipe as JSON and a table: what is `known` besides, and derived numbers. Those of the data need the
    corpus.
    """
    resolved = json.dumps(recipe.model_dump(mode="json"), indent=2)
    rows = {**(known or {}), **derive(recipe, corpus)}
    width = max(len(name) for name in rows)
    return "\n".join([resolved, "", *(f"{name:<{width}}  {value}" for name, value in rows.items())])


def derive(recipe: Recipe, corpus: CorpusPayload | None) -> dict[str, str]:
    """Derived numbers by name, formatted with their units."""
    model, batch, train = recipe.model, recipe.batch, recipe.train
    total_tokens = tokens_per_step(recipe) * train.max_steps
    rows = {
        "parameters": f"{model.num_parameters:,}",
        "tokens per step": f"{tokens_per_step(recipe):,}",
        "micro-batches per step": f"{batch.num_micro_batches} ({micro_batches_per_model(recipe)} per worker)",
        "tokens in max_steps": f"{total_tokens:,}",
        "floating-point operations": f"{total_tokens * flops_per_token(recipe):.2e}",
        "memory per worker, about": f"{memory_of_worker(recipe).peak_bytes / 2**20:,.0f} MiB",
        "checkpoint size": f"{checkpoint_bytes(recipe) / 2**20:,.0f} MiB",
        "graphs to compile": _graphs(recipe),
        "CPU cores for training": f"{recipe.parallel.num_workers * recipe.parallel.threads_per_worker}",
        "nodes on a cluster": ", ".join(_nodes(recipe, stage) for stage in STAGES),
    }
    if corpus is None:
        return rows | {"steps per epoch": "known once the tokenizer stage has published the corpus"}
    counts = corpus.splits["train"]
    steps = corpus.num_samples("train") / batch.global_batch_size
    return rows | {
        "training tokens": f"{counts.tokens:,} in {len(counts.shards)} shards",
        "steps per epoch": f"{steps:,.1f}",
        "epochs in max_steps": f"{train.max_steps / steps:,.2f}" if steps else "none: the corpus has no sample",
    }


def _graphs(recipe: Recipe) -> str:
    if not recipe.compile.enabled:
        return "none"
    graphs = BACKENDS[recipe.parallel.device].graphs
    return f"{len(graphs)} ({', '.join(graphs)})"


def _nodes(recipe: Recipe, stage: Stage) -> str:
    tasks = recipe.compile.num_workers if recipe.parallel.device == "xla" else 1
    if stage == "compiler" and tasks > 1 and not recipe.cluster.has_compiler_nodes:
        return f"{stage} as many as {tasks} tasks fill"
    return f"{stage} {stage_nodes(recipe, stage)}"


def flops_per_token(recipe: Recipe) -> float:
    """Forward and backward: 6 per parameter that multiplies, and causal attention (PaLM, arXiv 2204.02311, app. B)."""
    model = recipe.model
    multiplying = model.num_parameters - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)
    return 6.0 * multiplying + 6.0 * model.num_hidden_layers * model.hidden_size * recipe.corpus.sequence_length


def tokens_per_step(recipe: Recipe) -> int:
    return recipe.batch.global_batch_size * recipe.corpus.sequence_length
