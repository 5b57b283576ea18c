"""Opens a run: its artifacts, and the records in its folder, run/1."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from services.common.artifacts.checkpoint import Ancestor, CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import listed_file
from services.common.artifacts.manifest import Phase
from services.common.artifacts.store import Artifact, open_artifact
from services.common.errors import ArtifactError
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.lookup import (
    Verify,
    list_runs_command,
    newest_checkpoint,
    no_checkpoint_yet,
    require_of_run,
    verify_checkpoint,
)
from services.trainer.evaluation.records import EVALUATIONS_FILE, read_evaluations
from services.trainer.job import RUN_FILE, checkpoint_collection, describe_corpus, run_folder, run_name
from services.trainer.metrics.commands import CommandRecord, read_commands
from services.trainer.metrics.events import read_events
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
    divide_training,
)
from services.trainer.runs.description import damaged_description, read_description

REPORT_FILE = "report.html"


class RunSteps:
    """The records of a run's steps, which are read once, when a number of them is needed first."""

    def __init__(self, run_folder: Path) -> None:
        self._steps = StepsNewestFirst(run_folder)
        self._numbers: RunNumbers | None = None

    def read(self, observe: Callable[[dict[str, Any]], None] = lambda _: None) -> RunNumbers:
        """Read all records, newest first, and pass each to `observe`."""
        self._numbers = RunNumbers()
        for record in self._steps:
            self._numbers.add(record)
            observe(record)
        return self._numbers

    @property
    def numbers(self) -> RunNumbers:
        return self._numbers or self.read()

    @property
    def unreadable(self) -> int:
        """Number of lines that cannot be read."""
        if self._numbers is None:
            self.read()
        return self._steps.unreadable


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


def open_run(root: Path, name: str, verify: Verify = verify_checkpoint) -> Run:
    """Open a run that has a checkpoint. Raises `ArtifactError` if it has none yet."""
    run = open_started_run(root, name, verify)
    if not isinstance(run, Run):
        raise no_checkpoint_yet(checkpoint_collection(root, name))
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
    described = read_description(folder)
    try:
        recipe = Recipe.model_validate_json(json.dumps(described.recipe))
        corpus = open_artifact(root / described.paths["corpus"], CorpusManifest)
    except (ValueError, KeyError) as error:
        raise damaged_description(folder, error) from error
    described_corpus = describe_corpus(corpus)
    if (own := run_name(recipe, described_corpus, described.parent)) != name:
        raise damaged_description(folder, f"it describes the run {own}, expected {name}")
    checkpoint = newest_checkpoint(checkpoint_collection(root, name), verify)
    if checkpoint:
        require_of_run(checkpoint, recipe, described_corpus)
    cache_path = described.paths.get("compile_cache")
    evaluations, attempts = read_evaluations(folder), read_attempts(folder)
    found: dict[str, Any] = {
        "folder": folder,
        "recipe": recipe,
        "corpus": corpus,
        "cache": open_artifact(root / cache_path, CompileCacheManifest) if cache_path else None,
        "parent": described.parent,
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
