"""Derives numbers of a recipe before anything is computed: those of `--dry-run`, and time and price of its run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from services.common.hardware.image_platform import BACKENDS
from services.common.hardware.instance_types import InstanceType, read_instance_types
from services.common.recipe.memory_estimate import (
    checkpoint_bytes,
    memory_of_worker,
    micro_batches_per_model,
    show_size,
)
from services.common.recipe.schema import STAGES, Recipe, Stage, stage_nodes

if TYPE_CHECKING:
    from services.common.artifacts.corpus import CorpusPayload

Corpora: TypeAlias = "Mapping[str, CorpusPayload]"
"""The corpora that a run trains on, by their names in `corpus_weights`."""
MAX_EPOCHS = 4
"""Epochs up to which repeated text teaches almost as much as new text (arXiv 2305.16264)."""
NEURON_MFU_OF_PRESETS = {"llama2-7b": 0.37, "llama2-13b": 0.29, "llama3-8b": 0.21, "llama3.1-8b": 0.21}
"""Share of its peak that a NeuronCore is assumed to reach, by preset: that of AWS Neuron's training benchmarks on
trn1.32xlarge, by `causal_flops_per_token`: Llama 2 7B with 101.3 sequences of 4,096 tokens a second on 16 nodes and
Llama 2 13B with 84.0 on 32 (SDK 2.20), and Llama 3.1 8B with 47.95 of 8,192 tokens on 32 (SDK 2.24). No training
benchmark is published for trn2, so a preset has the same share there.
"""
NEURON_MFU = 0.29
"""Share for a model without a published benchmark: that between the others."""
GPU_MFU = 0.42
"""Share of its dense bfloat16 peak that a GPU is assumed to reach, by `causal_flops_per_token`: that of a compiled
Llama of a billion parameters on one H100 (docs/benchmarks/trainer.md).
"""


@dataclass(frozen=True)
class StepEstimate:
    """Time and price of a step on the instance type of a recipe, and of all steps of its run."""

    device: InstanceType
    mfu: float
    mfu_source: str
    seconds: float
    price: float | None
    """Dollars for an hour of a node; None if no list has them."""
    price_source: str
    nodes: int
    node_hours: float
    """Hours of the run, times its nodes."""

    def describe_hours(self) -> str:
        hours, node_hours = round_hours(self.node_hours / self.nodes), round_hours(self.node_hours)
        return f"{hours:,.9g} hours, {node_hours:,.9g} node-hours"

    def describe_cost(self) -> str:
        if self.price is None:
            return f"unknown: no public list has a price of {self.device.name} (plan --dollars-per-node-hour)"
        dollars = self.node_hours * self.price
        return f"${dollars:,.0f} at ${self.price:,.2f} for a node-hour ({self.price_source})"


def round_hours(hours: float) -> float:
    """Return the hours of an estimate as people read them: whole ones from 100 on, else with three digits."""
    return round(hours) if hours >= 100 else float(f"{hours:.3g}")


def corpus_weights(recipe: Recipe) -> dict[str, int]:
    """Return the weight of each corpus that the recipe's run trains on, its own first."""
    own, mixture = recipe.corpus.name, recipe.train.mixture or {recipe.corpus.name: 1}
    return {name: mixture[name] for name in sorted(mixture, key=lambda name: (name != own, name))}


def describe(recipe: Recipe, corpora: Corpora | None, known: Mapping[str, str] | None = None) -> str:
    """Return the resolved recipe as JSON, and a table of the rows in `known` and of the derived numbers."""
    resolved = json.dumps(recipe.model_dump(mode="json"), indent=2)
    rows = {**(known or {}), **derive(recipe, corpora)}
    width = max(len(name) for name in rows)
    return "\n".join([resolved, "", *(f"{name:<{width}}  {value}" for name, value in rows.items())])


def derive(recipe: Recipe, corpora: Corpora | None) -> dict[str, str]:
    """Return the derived numbers by name, formatted with their units."""
    model, batch, num_steps = recipe.model, recipe.batch, steps_of_run(recipe)
    total_tokens = tokens_per_step(recipe) * num_steps
    rows = {
        "parameters": f"{model.num_parameters:,}",
        "tokens per step": f"{tokens_per_step(recipe):,}",
        "micro-batches per step": f"{batch.num_micro_batches} ({micro_batches_per_model(recipe)} per worker)",
        "tokens in max_steps": f"{total_tokens:,}",
        "floating-point operations": f"{total_tokens * causal_flops_per_token(recipe):.2e}",
        "memory per worker, about": show_size(memory_of_worker(recipe).peak_bytes),
        "checkpoint size": show_size(checkpoint_bytes(recipe)),
        "graphs to compile": _graphs(recipe),
        "CPU cores for training": f"{recipe.parallel.num_workers * recipe.parallel.threads_per_worker}",
        "nodes on a cluster": ", ".join(_nodes(recipe, stage) for stage in STAGES),
        "evaluation": _describe_evaluation(recipe, corpora),
    }
    if mismatch := check_schedule(recipe):
        rows["warning, schedule"] = mismatch
    if corpora is None:
        unknown = "known once the tokenizer stage has published the corpus"
        return rows | {"steps per epoch": unknown, "epochs in max_steps": unknown}
    if repetition := check_epochs(recipe, corpora):
        rows["warning, epochs"] = repetition
    if len(corpora) > 1:
        weights, epochs = corpus_weights(recipe), count_epochs(recipe, corpora)
        return rows | {
            f"corpus {name}": f"{weights[name] / sum(weights.values()):.2%} of the samples, "
            f"{corpus.splits['train'].tokens:,} training tokens, {epochs[name]:,.2f} epochs in max_steps"
            for name, corpus in corpora.items()
        }
    [corpus] = corpora.values()
    steps = corpus.num_samples("train") / batch.global_batch_size
    return rows | {
        "training tokens": f"{corpus.splits['train'].tokens:,} in {corpus.num_shards('train'):,} shards",
        "steps per epoch": f"{steps:,.1f}",
        "epochs in max_steps": f"{num_steps / steps:,.2f}" if steps else "none, because the corpus has no sample",
    }


def _describe_evaluation(recipe: Recipe, corpora: Corpora | None) -> str:
    asked, length = recipe.train.evaluation_tokens, recipe.corpus.sequence_length
    every = f"every {recipe.train.evaluation_interval_steps:,} steps"
    if asked == 0:
        return "none"
    if corpora is None and asked is None:
        return f"the whole validation split {every}"
    sizes = [] if asked is None else [-(-asked // length) * length]
    if corpora:
        sizes.append(sum(max(0, corpus.splits["validation"].tokens - 1) for corpus in corpora.values()))
    # A target takes a forward pass, and a token of training a backward pass with twice the operations, too.
    evaluated, trained = min(sizes) / 3, recipe.train.evaluation_interval_steps * tokens_per_step(recipe)
    return f"{min(sizes):,} tokens {every}, {evaluated / (evaluated + trained):.1%} of all operations"


def count_epochs(recipe: Recipe, corpora: Corpora) -> dict[str, float]:
    """Return how many times `train.max_steps` trains on each corpus; 0 for one without a sample."""
    weights, drawn = corpus_weights(recipe), steps_of_run(recipe) * recipe.batch.global_batch_size
    shares = {name: drawn * weights[name] / sum(weights.values()) for name in corpora}
    return {name: shares[name] / (each.num_samples("train") or math.inf) for name, each in corpora.items()}


def check_epochs(recipe: Recipe, corpora: Corpora) -> str:
    """Return a warning where `train.max_steps` repeats a corpus more than MAX_EPOCHS times; empty otherwise."""
    name, epochs = max(count_epochs(recipe, corpora).items(), key=lambda item: item[1])
    if epochs <= MAX_EPOCHS:
        return ""
    weights, samples = corpus_weights(recipe), corpora[name].num_samples("train")
    drawn = MAX_EPOCHS * samples * sum(weights.values()) // weights[name]
    most, which = recipe.train.first_step + drawn // recipe.batch.global_batch_size, f" {name}" * (len(corpora) > 1)
    return (
        f"train.max_steps is {recipe.train.max_steps:,}, which trains on the corpus{which} {epochs:,.1f} times: beyond "
        f"{MAX_EPOCHS} epochs repeated text teaches little (arXiv 2305.16264): end at step {most:,}, or take more text"
    )


def check_schedule(recipe: Recipe) -> str:
    """Return a warning where `train.max_steps` is not the end of the learning rate's schedule; empty otherwise."""
    optimizer, last = recipe.optimizer, recipe.train.max_steps
    end = optimizer.decay_steps
    if end is None or end == last:
        return ""
    ends = f"train.max_steps is {last:,} and optimizer.decay_steps {end:,}: "
    if last > end:
        rest = f"train at {optimizer.min_learning_rate:g}" if optimizer.min_learning_rate else "change no weight"
        return f"{ends}after the schedule's end the last {last - end:,} steps {rest}"
    return f"{ends}the run ends {end - last:,} steps before its rate reaches {optimizer.min_learning_rate:g}"


OF_LAYERS = ("layer forward", "layer backward", "layer evaluate", "loss forward", "loss backward")
"""Graphs of ZeRO-3, whatever the number of layers, in place of `forward` and `backward`."""


def _graphs(recipe: Recipe) -> str:
    if not recipe.compile.enabled:
        return "none"
    graphs = BACKENDS[recipe.parallel.device].graphs
    if recipe.parallel.zero_stage == 3:
        graphs = (*OF_LAYERS, *(each for each in graphs if each not in ("forward", "backward")))
    return f"{len(graphs)} ({', '.join(graphs)})"


def _nodes(recipe: Recipe, stage: Stage) -> str:
    tasks = recipe.compile.num_workers if recipe.parallel.device == "xla" else 1
    if stage == "compiler" and tasks > 1 and not recipe.cluster.has_compiler_nodes:
        return f"{stage} as many as {tasks} tasks need"
    return f"{stage} {stage_nodes(recipe, stage)}"


def palm_flops_per_token(recipe: Recipe) -> float:
    """Return the FLOP of forward and backward pass for a token by the published convention of MFU.

    It is 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B) for N parameters, L layers, H heads of dimension Q and
    sequences of T tokens: all T x T scores of attention count. An embedding that is only looked up is not in N.
    """
    return 6.0 * _multiplied_parameters(recipe) + 2.0 * _causal_attention_flops_per_token(recipe)


def causal_flops_per_token(recipe: Recipe) -> float:
    """Return the FLOP of forward and backward pass for a token, where attention counts the scores below the diagonal.

    It is 6 N + 6 L H Q T, in the terms of `palm_flops_per_token`: a causal mask leaves half of the scores.
    """
    return 6.0 * _multiplied_parameters(recipe) + _causal_attention_flops_per_token(recipe)


def _multiplied_parameters(recipe: Recipe) -> int:
    model = recipe.model
    return model.num_parameters - (0 if model.tie_word_embeddings else model.num_vocab_rows * model.hidden_size)


def _causal_attention_flops_per_token(recipe: Recipe) -> float:
    model = recipe.model
    return 6.0 * model.num_hidden_layers * model.query_size * recipe.corpus.sequence_length


def steps_of_run(recipe: Recipe) -> int:
    """Return the steps that the run itself takes: a branch does not count those of its parent."""
    return recipe.train.max_steps - recipe.train.first_step


def tokens_per_step(recipe: Recipe) -> int:
    return recipe.batch.global_batch_size * recipe.corpus.sequence_length


def instance_type(recipe: Recipe) -> InstanceType | None:
    """Return the instance type of the trainer's nodes, divided for its workers; None if the recipe names none."""
    name = recipe.cluster.trainer_instance_type
    return read_instance_types()[name].divided_for(recipe.cluster.trainer_workers_per_node) if name else None


def estimate_step(recipe: Recipe, mfu: float | None = None, price: float | None = None) -> StepEstimate | None:
    """Estimate a step on all workers, without idle cores; None if the recipe names no instance type."""
    device = instance_type(recipe)
    if device is None:
        return None
    share, source = _assume_mfu(recipe, device) if mfu is None else (mfu, "--mfu")
    peak = recipe.parallel.num_workers * device.worker_peak_flops_per_second
    seconds = causal_flops_per_token(recipe) * tokens_per_step(recipe) / (peak * share)
    listed = f"on demand, {device.price_source}" if price is None else "--dollars-per-node-hour"
    nodes, price = stage_nodes(recipe, "trainer"), device.dollars_per_hour if price is None else price
    node_hours = nodes * seconds * steps_of_run(recipe) / 3600
    return StepEstimate(device, share, source, seconds, price, listed, nodes, node_hours)


def _assume_mfu(recipe: Recipe, device: InstanceType) -> tuple[float, str]:
    """Return the share of the peak that a step of the recipe is assumed to reach, and where that share comes from."""
    if device.accelerators == "GPUs":
        return GPU_MFU, "measured on one H100"
    if share := NEURON_MFU_OF_PRESETS.get(recipe.model.preset or ""):
        return share, "AWS's benchmark of this size on trn1"
    return NEURON_MFU, "AWS's benchmark of Llama 2 13B on trn1; none is known for this size"
