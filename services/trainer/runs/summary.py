"""Summarizes a run and what the three stages made, in a dozen lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.common.artifacts.files import total_bytes
from services.common.artifacts.manifest import Phase
from services.common.artifacts.store import Artifact
from services.common.problem_list import list_names
from services.common.recipe.derived import tokens_per_step
from services.common.recipe.schema import stage_nodes
from services.trainer.evaluation.records import describe_mean
from services.trainer.inspection.goodput import NODE_MTBF_HOURS, optimal_interval_steps
from services.trainer.metrics.events import count_events
from services.trainer.runs.cost import (
    describe_training_cost,
)
from services.trainer.runs.listing import branches_of
from services.trainer.runs.run import REPORT_FILE, Run
from services.trainer.runs.status import read_statuses


def summarize(run: Run) -> str:
    """Summarize in a dozen lines what each stage made, how long it took, and how training went.

    Unreadable lines of the metrics are skipped and counted: they hold no training state.
    """
    made = {"tokenizer": run.corpus, "compiler": run.cache, "trainer": run.checkpoint}
    rows = [_stage_row(stage, artifact, run.phases[stage]) for stage, artifact in made.items() if artifact]
    numbers = run.numbers
    events = ", ".join(f"{count} {name}" for name, count in count_events(run.folder).items())
    lines = [
        *rows,
        *_describe_relatives(run),
        f"loss          {_describe_loss(numbers)}",
        *([f"validation    {_describe_evaluations(run)}"] if run.evaluations else []),
        *([f"held          {describe_training_cost(cost)}"] if (cost := run.costs[-1]).held_node_hours else []),
        f"trained on    {numbers['tokens']:,} tokens, {numbers.get('tokens_per_second', 0.0):,.0f} tokens/s",
        *([f"efficiency    {_describe_efficiency(numbers)}"] if "tokens_per_second" in numbers else []),
        f"skipped       {describe_skips(run)}",
        *([f"events        {events}"] if events else []),
        f"checkpoints   {_describe_checkpoints(run)}",
        f"misses        {_describe_misses(run)}",
        *(f"unreadable    {count:,} lines in {run.folder / file}" for file, count in run.unreadable.items() if count),
        f"report        {run.folder / REPORT_FILE}",
    ]
    return "\n".join(lines)


def _describe_relatives(run: Run) -> Iterator[str]:
    """Yield a line about the run's parent, and one about its branches, where there are any."""
    if parent := run.checkpoint.manifest.checkpoint.parent:
        yield f"branched from {parent.run} after step {parent.step:,} (digest {parent.content_digest[:12]})"
    if children := branches_of(read_statuses(run.folder.parents[1]), run.folder.name):
        yield f"branches      {list_names(f'{each.run} after step {each.branch_step:,}' for each in children)}"


def _describe_loss(numbers: Mapping[str, float]) -> str:
    if "first_loss" not in numbers:
        return "unknown: the run's metrics are lost"
    first = f"{numbers['first_loss']:.3f} at step {numbers['first_step']:,} -> "
    if "loss" not in numbers:
        return f"{first}unknown: no recorded step updated the weights"
    error = f" +- {numbers['loss_standard_error']:.3f}" if "loss_standard_error" in numbers else ""
    return (
        f"{first}{numbers['loss']:.3f}{error} nats per token, the mean of steps {numbers['loss_first_step']:,} to "
        f"{numbers['loss_last_step']:,} (perplexity {numbers['perplexity']:,.2f})"
    )


def _describe_evaluations(run: Run) -> str:
    """Describe the newest evaluation, the loss of the first one, and the time that all of them took."""
    first, last = run.evaluations[0], run.evaluations[-1]
    training_seconds = run.numbers.get("training_seconds", 0.0)
    seconds = sum(evaluation["seconds"] for evaluation in run.evaluations)
    share = f"; evaluations took {seconds / (seconds + training_seconds):.1%} of the time" if seconds else ""
    return f"{first['loss']:.2f} at step {first['step']} -> {describe_mean(last)} at step {last['step']}{share}"


def _describe_efficiency(numbers: Mapping[str, float]) -> str:
    parts = [
        *([f"MFU {numbers['mfu']:.1%} by PaLM's convention"] if "mfu" in numbers else []),
        *([f"{numbers['mfu_causal']:.1%} with causal attention counted once"] if "mfu_causal" in numbers else []),
        f"goodput {numbers['goodput']:.1%}",
        f"{numbers['data_share']:.2%} of the time waiting for data",
        f"{numbers['restarts']} restarts",
    ]
    return ", ".join(parts)


def describe_skips(run: Run) -> str:
    state = run.checkpoint.manifest.checkpoint
    if state.skipped_steps == 0:
        return "no step"
    return f"{state.skipped_steps:,} of {state.step:,} steps updated nothing, because gradients were not finite"


def _describe_checkpoints(run: Run) -> str:
    """Describe the interval between checkpoints, and Young's optimum for the cost that this run measured."""
    every = f"every {run.recipe.checkpoint.interval_steps:,} steps"
    numbers = run.numbers
    if "checkpoint_stall_seconds" not in numbers or "tokens_per_second" not in numbers:
        return f"{every}; their cost is unknown: the run's metrics are lost"
    stall = numbers["checkpoint_stall_seconds"]
    nodes = run.commands[-1].nodes if run.commands else stage_nodes(run.recipe, "trainer")
    step_seconds = tokens_per_step(run.recipe) / numbers["tokens_per_second"]
    optimum = optimal_interval_steps(stall, step_seconds, nodes, NODE_MTBF_HOURS)
    slowest = numbers.get("slowest_checkpoint_seconds", 0.0)
    return (
        f"{every}; each stopped training for {stall:.2f} s, and the slowest took {slowest:.2f} s; Young's optimum is "
        f"every {optimum:,} steps, if one of {nodes} nodes fails in {NODE_MTBF_HOURS / nodes:,.0f} hours"
    )


def _describe_misses(run: Run) -> str:
    """Describe the compile misses that workers counted in attempts that were not killed."""
    if not run.recipe.compile.enabled:
        return "none possible: compile.enabled = false"
    if not run.attempts:
        return "not measured: every attempt of this run was killed"
    numbers = run.numbers
    graphs, files = numbers["graphs_compiled"], numbers["new_cache_files"]
    return f"{graphs} graphs compiled and {files} files added to the compile cache while training"


def _stage_row(stage: str, artifact: Artifact[Any], phases: list[Phase]) -> str:
    path = artifact.path
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    size_bytes = total_bytes(artifact.manifest.files)
    return f"{stage:<13} {shown}  {size_bytes / 1e6:,.1f} MB  {sum(phase.seconds for phase in phases):,.0f} s"
