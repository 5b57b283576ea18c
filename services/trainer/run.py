"""Writes and reads run/1, the folder of a run, and summarizes the run and its artifacts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from services.common.artifacts.checkpoint import Ancestor, CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import listed_file, total_bytes
from services.common.artifacts.manifest import Phase, write_durably
from services.common.artifacts.store import Address, Artifact, open_artifact
from services.common.errors import ArtifactError, MillraceError, unreadable
from services.common.problem_list import list_names
from services.common.recipe.derived import tokens_per_step
from services.common.recipe.schema import Recipe, stage_nodes
from services.trainer.checkpoints.lookup import (
    Verify,
    list_runs_command,
    newest_checkpoint,
    no_checkpoint_yet,
    require_of_run,
    verify_checkpoint,
)
from services.trainer.corpus import describe_corpus
from services.trainer.evaluation.records import EVALUATIONS_FILE, describe_mean, read_evaluations
from services.trainer.inspection.goodput import NODE_MTBF_HOURS, optimal_interval_steps
from services.trainer.job import RUN_FILE, Job, run_folder, run_name
from services.trainer.metrics.commands import CommandRecord, read_commands
from services.trainer.metrics.events import count_events, read_events
from services.trainer.metrics.records import (
    ATTEMPTS_FILE,
    METRICS_FILE,
    StepsNewestFirst,
    read_attempts,
    read_last_step,
)
from services.trainer.metrics.run_numbers import RunNumbers
from services.trainer.runs.cost import (
    StageCost,
    compute_costs,
    describe_costs,
    describe_training_cost,
    divide_training,
)
from services.trainer.runs.listing import branches_of
from services.trainer.runs.status import read_statuses

logger = logging.getLogger(__name__)

SCHEMA = "run/1"
REPORT_FILE = "report.html"


class RunSteps:
    """The records of a run's steps, which are read once, when a number of them is needed first."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._numbers: RunNumbers | None = None
        self._unreadable = 0

    def read(self, observe: Callable[[dict[str, Any]], None] = lambda _: None) -> RunNumbers:
        """Read all records, newest first, and pass each to `observe`.

        Raises `ArtifactError` if something else than a file is in the file's place.
        """
        self._numbers = RunNumbers()
        steps = StepsNewestFirst(self._run_folder)
        for record in steps:
            self._numbers.add(record)
            observe(record)
        self._unreadable = steps.unreadable
        return self._numbers

    @property
    def numbers(self) -> RunNumbers:
        return self._numbers or self.read()

    @property
    def unreadable(self) -> int:
        """Number of lines that cannot be read."""
        return self._unreadable if self._numbers or self.read() else 0


@dataclass(frozen=True)
class StartedRun:
    """A run with its artifacts and records, as read from its folder. It may have no checkpoint yet."""

    folder: Path
    recipe: Recipe
    corpus: Artifact[CorpusManifest]
    cache: Artifact[CompileCacheManifest] | None
    parent: Ancestor | None
    """The checkpoint of another run that this one began with; None if it is no branch."""
    evaluations: list[dict[str, Any]]
    attempts: list[dict[str, Any]]
    unreadable_lines: Mapping[str, int]
    """Number of unreadable lines of evaluations and attempts, by the name of the file."""
    steps: RunSteps

    @property
    def unreadable(self) -> dict[str, int]:
        """Number of unreadable lines, by the name of the file."""
        return {METRICS_FILE: self.steps.unreadable, **self.unreadable_lines}

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Numbers of the training by name; see `RunNumbers.collect`."""
        return self.steps.numbers.collect(self.attempts)

    @property
    def costs(self) -> list[StageCost]:
        """Costs of the stages, in the order in which they ran; the trainer's is the last."""
        cache = self.cache.manifest if self.cache else None
        newest_step = read_last_step(self.folder) or {}
        return compute_costs(self.recipe, self.corpus.manifest.corpus, cache, self.commands, newest_step)

    @cached_property
    def commands(self) -> list[CommandRecord]:
        """Records of the commands that trained the run, oldest first."""
        return read_commands(self.folder)

    @cached_property
    def phases(self) -> dict[str, list[Phase]]:
        """Timed phases of each stage, in the order in which the stages ran. A command that goes on ends where it is."""
        cache = list(self.cache.manifest.compile_cache.phases) if self.cache else []
        training = divide_training(self.commands, read_events(self.folder), self.attempts, time.time())
        return {"tokenizer": list(self.corpus.manifest.corpus.phases), "compiler": cache, "trainer": training}


@dataclass(frozen=True)
class Run(StartedRun):
    """A run that has a checkpoint."""

    checkpoint: Artifact[CheckpointManifest]

    @property
    def state(self) -> str:
        """Identifier of the newest state, made of its step and its content digest."""
        return describe_state(self.checkpoint)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Numbers of the training by name; see `RunNumbers.collect`.

        `tokens`, `step` and `skipped_steps` are those of the newest checkpoint.
        """
        state = self.checkpoint.manifest.checkpoint
        found = self.steps.numbers.collect(self.attempts)
        return {"step": state.step, "tokens": state.tokens, "skipped_steps": state.skipped_steps, **found}


def describe_state(checkpoint: Artifact[CheckpointManifest]) -> str:
    return f"{checkpoint.manifest.id} {checkpoint.manifest.content_digest}"


def write_run(job: Job) -> None:
    """Write run.json, which names the run's artifacts by their paths below the root: a root may be moved."""
    run: dict[str, Any] = {
        "schema": SCHEMA,
        "run": job.run,
        "recipe": job.recipe.model_dump(mode="json"),
        "artifacts": {"corpus": job.corpus.id},
        "paths": {
            "corpus": _below(job.root, job.corpus.path),
            "checkpoints": _below(job.root, job.checkpoint_collection),
        },
    }
    if job.lineage.parent:
        run["parent"] = job.lineage.parent.model_dump(mode="json")
    if job.cache:
        run["artifacts"]["compile_cache"] = job.cache.manifest.id
        run["paths"]["compile_cache"] = _below(job.root, job.cache.path)
    run["costs"] = describe_costs(job)
    (job.run_folder / "logs").mkdir(parents=True, exist_ok=True)
    write_durably(job.run_folder / RUN_FILE, json.dumps(run, indent=1).encode())


@contextmanager
def writing_costs(job: Job) -> Iterator[None]:
    """Write run.json again after the block, with the costs of the run until then. A failure is logged alone."""
    try:
        yield
    finally:
        if (job.run_folder / RUN_FILE).exists():
            try:
                write_run(job)
            except (MillraceError, OSError) as error:
                logger.warning("%s: the costs could not be written: %s", job.run_folder / RUN_FILE, error)


def _below(root: Path, path: Path) -> str:
    """Return `path` relative to the root, or absolute if `--corpus` or `--cache` named a folder outside."""
    path, root = path.absolute(), root.absolute()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def open_run(root: Path, name: str, verify: Verify = verify_checkpoint) -> Run:
    """Open a run that has a checkpoint. Raises `ArtifactError` if it has none yet."""
    run = open_started_run(root, name, verify)
    if not isinstance(run, Run):
        raise no_checkpoint_yet(Address(root, "checkpoint", name, "").collection)
    return run


def open_started_run(root: Path, name: str, verify: Verify = verify_checkpoint) -> StartedRun:
    """Open a run, which is a `Run` if it has a checkpoint, the newest one that passes `verify`.

    A caller that reads no weights passes `verify_sizes`, which reads no file of the checkpoint. Raises `ArtifactError`
    if the run does not exist.
    """
    folder = run_folder(root, name)
    if not (folder / RUN_FILE).exists():
        raise ArtifactError(
            f"{folder}: no such run. Train it first, or pass the recipe and the overrides of another run: "
            f"`{list_runs_command(root)}` lists them."
        )
    try:
        described = json.loads((folder / RUN_FILE).read_bytes())
        schema, paths = described["schema"], described["paths"]
        corpus_path = root / paths["corpus"]
        cache_path = root / paths["compile_cache"] if "compile_cache" in paths else None
        recipe = Recipe.model_validate_json(json.dumps(described["recipe"]))
        parent = Ancestor.model_validate(described["parent"]) if "parent" in described else None
    except OSError as error:
        raise unreadable(folder / RUN_FILE, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{folder / RUN_FILE}: damaged, or of another version: {error}. "
            f"The trainer's command for this recipe writes it again."
        ) from error
    if schema != SCHEMA:
        raise ArtifactError(f"{folder / RUN_FILE}: schema {schema!r}, this program reads {SCHEMA!r}.")
    corpus = open_artifact(corpus_path, CorpusManifest)
    described_corpus = describe_corpus(corpus)
    if (own := run_name(recipe, described_corpus, parent)) != name:
        raise ArtifactError(
            f"{folder / RUN_FILE}: describes the run {own}, expected {name}. "
            f"The trainer's command for this recipe writes it again."
        )
    collection = Address(root, "checkpoint", name, "").collection
    checkpoint = newest_checkpoint(collection, verify)
    if checkpoint:
        require_of_run(checkpoint, recipe, described_corpus)
    evaluations, attempts = read_evaluations(folder), read_attempts(folder)
    found: dict[str, Any] = {
        "folder": folder,
        "recipe": recipe,
        "corpus": corpus,
        "cache": open_artifact(cache_path, CompileCacheManifest) if cache_path else None,
        "parent": parent,
        "evaluations": evaluations.lines,
        "attempts": attempts.lines,
        "unreadable_lines": {EVALUATIONS_FILE: evaluations.unreadable, ATTEMPTS_FILE: attempts.unreadable},
        "steps": RunSteps(folder),
    }
    return Run(**found, checkpoint=checkpoint) if checkpoint else StartedRun(**found)


def vocabulary_file(run: Run) -> Path:
    """Return the verified vocabulary file of the run's corpus. Raises `ArtifactError` if it is damaged."""
    manifest = run.corpus.manifest
    return listed_file(run.corpus.path, manifest, manifest.corpus.vocabulary.path)


def summarize(run: Run) -> str:
    """Summarize in a dozen lines what each stage made, how long it took, and how training went.

    Unreadable lines of the metrics are skipped and counted: they hold no training state.
    """
    made = {"tokenizer": run.corpus, "compiler": run.cache, "trainer": run.checkpoint}
    rows = [_stage_row(stage, artifact, run.phases[stage]) for stage, artifact in made.items() if artifact]
    numbers = run.numbers
    lines = [
        *rows,
        *_describe_relatives(run),
        f"loss          {_describe_loss(numbers)}",
        *([f"validation    {_describe_evaluations(run)}"] if run.evaluations else []),
        *([f"held          {describe_training_cost(cost)}"] if (cost := run.costs[-1]).held_node_hours else []),
        f"trained on    {numbers['tokens']:,} tokens, {numbers.get('tokens_per_second', 0.0):,.0f} tokens/s",
        *([f"efficiency    {_describe_efficiency(numbers)}"] if "tokens_per_second" in numbers else []),
        f"skipped       {describe_skips(run)}",
        *([f"events        {events}"] if (events := describe_events(run)) else []),
        f"checkpoints   {describe_checkpoints(run)}",
        f"misses        {describe_misses(run)}",
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


def describe_events(run: Run) -> str:
    """Return the number of events of each kind; empty if there were none."""
    return ", ".join(f"{count} {name}" for name, count in count_events(run.folder).items())


def describe_checkpoints(run: Run) -> str:
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


def describe_misses(run: Run) -> str:
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
