"""Tells how a run went: in a dozen facts, which are the tiles of its report, and as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.files import total_bytes
from services.common.problem_list import list_names
from services.common.process.progress import write_duration
from services.trainer.metrics.events import count_events
from services.trainer.runs.run import REPORT_FILE, Run
from services.trainer.runs.status import branches_of, read_status, read_statuses


class Fact(NamedTuple):
    """A number of a run."""

    label: str
    value: str
    note: str = ""
    share: float | None = None
    """Share of a bar below the value, from 0 to 1; None for no bar."""


def describe_training(run: Run) -> str:
    """Return what a run trains, in one line: family, parameters, tokens so far, corpora and tokenizer."""
    model, vocabulary = run.recipe.model, run.corpus.manifest.corpus.vocabulary
    family, tokens = "Qwen3" if model.qk_norm else "Llama", read_status(run.root, run.name).tokens or 0
    return (
        f"{family} of {_write_number(model.num_parameters)} parameters, {_write_number(tokens)} tokens of "
        f"{' and '.join(run.corpora)}, {Path(vocabulary.path).name} with {vocabulary.vocab_size:,} pieces"
    )


def list_facts(run: Run) -> Iterator[Fact]:
    """Yield the numbers of a run that are known."""
    numbers, status = run.numbers, read_status(run.root, run.name)
    share = min(1.0, status.step / status.max_steps) if status.max_steps else None
    of_all = f" of {status.max_steps:,}" if status.max_steps else ""
    ended = f"; exit code {status.exit_code}" if status.exit_code else ""
    yield Fact("State", status.state, f"step {status.step:,}{of_all}{ended}", share)
    if "loss" in numbers:
        error = f"± {numbers['loss_standard_error']:.3f} " if "loss_standard_error" in numbers else ""
        steps = f"steps {numbers['loss_first_step']:,} to {numbers['loss_last_step']:,}"
        yield Fact("Training loss", f"{numbers['loss']:.3f}", f"{error}nats per token, mean of {steps}")
    if run.evaluations:
        newest = run.evaluations[-1]
        error = f"± {newest['standard_error']:.3f} " if newest["standard_error"] is not None else ""
        bits = f", {newest['bits_per_byte']:.3f} bits per byte" if newest["bits_per_byte"] is not None else ""
        yield Fact("Validation loss", f"{newest['loss']:.3f}", f"{error}at step {newest['step']:,}{bits}")
    if status.tokens is not None:
        total = f"of {_write_number(status.total_tokens)}" if status.total_tokens else ""
        seen = min(1.0, status.tokens / status.total_tokens) if status.total_tokens else None
        yield Fact("Tokens seen", _write_number(status.tokens), total, seen)
    if status.seconds_left:
        yield Fact("Time left", write_duration(status.seconds_left))
    if status.began_at:
        yield Fact("Began", f"{status.began_at:%Y-%m-%d}", f"{status.began_at:%H:%M} UTC")
    if "tokens_per_second" in numbers:
        yield Fact("Tokens per second", _write_number(numbers["tokens_per_second"]), "mean, without first steps")
    if "mfu" in numbers:
        causal = numbers.get("mfu_causal")
        note = f"{causal:.1%} counting only the causal half of attention" if causal is not None else ""
        yield Fact("MFU", f"{numbers['mfu']:.1%}", note)
    if status.goodput is not None:
        restarts = int(numbers.get("restarts", 0))
        yield Fact("Goodput", f"{status.goodput:.1%}", f"{restarts:,} restart{'' if restarts == 1 else 's'}")
    if status.cost is not None:
        yield Fact("Cost so far", f"${status.cost:,.2f}", "by on-demand prices, while nodes were held")
    if status.chip_hours is not None:
        yield Fact("Chip-hours", f"{status.chip_hours:,.2f}", "accelerators times the hours they were held")


def summarize(run: Run) -> str:
    """Return a text with what each stage made, the run's facts, and what took its time."""
    rows = [
        ("Trained", describe_training(run)),
        *_describe_artifacts(run),
        *_describe_relatives(run),
        *((fact.label, f"{fact.value}  {fact.note.replace('±', '+-')}".rstrip()) for fact in list_facts(run)),
        *_describe_times(run),
        ("Skipped", describe_skips(run)),
        ("Events", ", ".join(f"{count} {name}" for name, count in count_events(run.folder).items()) or "none"),
        ("Report", str(run.folder / REPORT_FILE)),
    ]
    return "\n".join(f"{name.lower():<18} {text}" for name, text in rows)


def _describe_artifacts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the stage, the path, the size and the seconds of what each stage made."""
    corpora = [("tokenizer", each, each.manifest.corpus.phases) for each in run.corpora.values()]
    others = [("compiler", run.cache, run.phases["compiler"]), ("trainer", run.checkpoint, run.phases["trainer"])]
    for stage, artifact, phases in (*corpora, *others):
        if artifact:
            path = artifact.path
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            seconds = sum(phase.seconds for phase in phases)
            yield stage, f"{shown}  {total_bytes(artifact.manifest.files) / 1e6:,.1f} MB  {seconds:,.0f} s"


def _describe_relatives(run: Run) -> Iterator[tuple[str, str]]:
    """Yield a row about the run's parent, and one about its branches, where there are any."""
    if parent := run.checkpoint.manifest.checkpoint.parent:
        yield "branched from", f"{parent.run} after step {parent.step:,} (digest {parent.content_digest[:12]})"
    if children := branches_of(read_statuses(run.root), run.name):
        yield "branches", list_names(f"{each.run} after step {each.branch_step:,}" for each in children)


def _describe_times(run: Run) -> Iterator[tuple[str, str]]:
    """Yield rows about the time of nodes, data, evaluations and checkpoints, and compile misses, where measured."""
    numbers, cost = run.numbers, run.costs[-1]
    if "perplexity" in numbers:
        first = f"a loss of {numbers['first_loss']:.3f} at step {numbers['first_step']:,}"
        yield "perplexity", f"{numbers['perplexity']:,.2f}, after {first}"
    if held := cost.held_node_hours:
        shares = f"{cost.computing_node_hours / held:.1%} computing, {cost.lost_node_hours / held:.1%} lost to restarts"
        yield "held", f"{held:,.2f} node-hours, {shares}"
    if seconds := sum(evaluation["seconds"] for evaluation in run.evaluations):
        share = seconds / (seconds + numbers.get("training_seconds", 0.0))
        yield "evaluations", f"{len(run.evaluations):,}, which took {share:.1%} of the time"
    if "data_share" in numbers:
        yield "data", f"{numbers['data_share']:.2%} of the time waiting for data"
    yield "checkpoints", f"every {run.recipe.checkpoint.interval_steps:,} steps"
    if "checkpoint_stall_seconds" in numbers:
        stall, slowest = numbers["checkpoint_stall_seconds"], numbers.get("slowest_checkpoint_seconds", 0.0)
        yield "", f"each stopped training for {stall:.2f} s, and the slowest took {slowest:.2f} s"
    if run.recipe.compile.enabled and not run.attempts:
        yield "misses", "not measured: every start of the workers was killed"
    elif run.recipe.compile.enabled:
        graphs, files = numbers["graphs_compiled"], numbers["new_cache_files"]
        yield "misses", f"{graphs} graphs compiled and {files} files added to the compile cache while training"


def describe_skips(run: Run) -> str:
    state = run.checkpoint.manifest.checkpoint
    if state.skipped_steps == 0:
        return "no step"
    return f"{state.skipped_steps:,} of {state.step:,} steps updated nothing, because gradients were not finite"


def _write_number(value: float) -> str:
    """Write a number in few characters: 1.5M, 20k, 1,500, 0.25."""
    for least, size, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
