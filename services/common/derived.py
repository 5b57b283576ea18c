"""What follows from a recipe: the numbers that `--dry-run` prints before anything is computed."""

from __future__ import annotations

import json

from services.common.artifacts.corpus import CorpusPayload
from services.common.image_platform import BACKENDS, image_variant
from services.common.recipe import STAGES, Recipe, stage_nodes


def describe(recipe: Recipe, corpus: CorpusPayload | None) -> str:
    """The resolved recipe as JSON and a table of derived numbers; those of the data need the corpus."""
    resolved = json.dumps(recipe.model_dump(mode="json"), indent=2)
    rows = derive(recipe, corpus)
    width = max(len(name) for name in rows)
    return "\n".join([resolved, "", *(f"{name:<{width}}  {value}" for name, value in rows.items())])


def derive(recipe: Recipe, corpus: CorpusPayload | None) -> dict[str, str]:
    """Derived numbers by name, formatted with their units."""
    model, batch, train = recipe.model, recipe.batch, recipe.train
    tokens_per_step = batch.global_batch_size * recipe.corpus.sequence_length
    total_tokens = tokens_per_step * train.max_steps
    rows = {
        "parameters": f"{model.num_parameters:,}",
        "tokens per step": f"{tokens_per_step:,}",
        "micro-batches per step": f"{batch.num_micro_batches} ({_micro_batches_per_model(recipe)} per worker)",
        "tokens in max_steps": f"{total_tokens:,}",
        "floating-point operations": f"{total_tokens * flops_per_token(recipe):.2e}",
        "memory per worker, about": f"{memory_per_worker_bytes(recipe) / 2**20:,.0f} MiB",
        "checkpoint size": f"{model.num_parameters * 12 / 2**20:,.0f} MiB",
        "graphs to compile": _graphs(recipe),
        "CPU cores for training": f"{recipe.parallel.num_workers * recipe.parallel.threads_per_worker}",
        "nodes on a cluster": ", ".join(f"{stage} {stage_nodes(recipe, stage)}" for stage in STAGES),
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
    backend = BACKENDS.get(image_variant())
    if not recipe.compile.enabled:
        return "none"
    return f"{len(backend.graphs)} ({', '.join(backend.graphs)})" if backend else "unknown: no backend for this image"


def flops_per_token(recipe: Recipe) -> float:
    """Forward and backward: 6 per parameter that multiplies, and causal attention (PaLM, arXiv 2204.02311, app. B)."""
    model = recipe.model
    multiplying = model.num_parameters - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)
    return 6.0 * multiplying + 6.0 * model.num_hidden_layers * model.hidden_size * recipe.corpus.sequence_length


def memory_per_worker_bytes(recipe: Recipe) -> int:
    """Weights and gradient in the model's type; masters where they are no views of the weights, two moments and partial
    sums of the reduction, in float32; activations of a micro-batch.

    Masters and moments are a share of them where the optimizer's state is sharded, and all a part where the model is
    split.
    """
    model, batch = recipe.model, recipe.batch
    parameters = model.num_parameters // recipe.parallel.tensor_parallel_size
    partial_sums = _micro_batches_per_model(recipe).bit_length()
    shares = recipe.parallel.data_parallel_size if recipe.parallel.zero_stage else 1
    width = 2 if recipe.train.param_dtype == "bfloat16" else 4
    has_masters = shares > 1 or width == 2
    state = parameters * (2 * width + 4 * partial_sums) + parameters * (12 if has_masters else 8) // shares
    tokens = batch.micro_batch_size * recipe.corpus.sequence_length
    per_layer = {  # saved for the backward pass
        "none": 10 * model.hidden_size + 4 * model.intermediate_size,
        "selective": 6 * model.hidden_size + 2 * model.intermediate_size,
        "full": model.hidden_size,
    }[recipe.train.activation_checkpointing]
    activations = tokens * 4 * (model.num_hidden_layers * per_layer + 2 * model.vocab_size)
    return state + activations // recipe.parallel.tensor_parallel_size


def _micro_batches_per_model(recipe: Recipe) -> int:
    return recipe.batch.num_micro_batches // recipe.parallel.data_parallel_size
