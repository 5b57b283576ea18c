"""Opens a run: its artifacts, and the records in its folder, run/1."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from services.common.artifacts.checkpoint import Ancestor, CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.manifest import Phase
from services.common.artifacts.store import Artifact, open_artifact
from services.common.recipe.derived import corpus_weights
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.lookup import (
    Verify,
    newest_checkpoint,
    no_checkpoint_yet,
    require_of_run,
    verify_checkpoint,
)
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import RUN_FILE, checkpoint_collection, describe_corpora, run_folder, run_name
from services.trainer.metrics.commands import CommandRecord, read_commands
from services.trainer.metrics.events import read_events
from services.trainer.metrics.records import read_attempts
from services.trainer.metrics.run_numbers import RunNumbers
from services.trainer.runs.cost import StageCost, compute_costs, divide_training
from services.trainer.runs.description import damaged_description, read_description
from services.trainer.runs.status import find_run

REPORT_FILE = "report.html"


@dataclass
class Run:
    """A run with its artifacts and records, as read from its folder."""

    root: Path
    name: str
    recipe: Recipe
    corpora: dict[str, Artifact[CorpusManifest]]
    """The corpora that the run trains on, by their names in the recipe, its own first."""
    cache: Artifact[CompileCacheManifest] | None
    parent: Ancestor | None
    """The checkpoint of another run that this one began with; None if it is no branch."""
    newest_checkpoint: Artifact[CheckpointManifest] | None
    """None before the first one."""

    @property
    def folder(self) -> Path:
        return run_folder(self.root, self.name)

    @property
    def corpus(self) -> Artifact[CorpusManifest]:
        """The run's own corpus, whose vocabulary is that of all."""
        return self.corpora[self.recipe.corpus.name]

    @property
    def checkpoint(self) -> Artifact[CheckpointManifest]:
        """The newest checkpoint of a run that has one, as `open_run` returns it."""
        assert self.newest_checkpoint
        return self.newest_checkpoint

    @cached_property
    def step_numbers(self) -> RunNumbers:
        """Numbers of the steps, all of which are read for them."""
        return RunNumbers(self.folder)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return read_evaluations(self.folder)

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        return read_attempts(self.folder)

    @cached_property
    def commands(self) -> list[CommandRecord]:
        """Records of the commands that trained the run, oldest first."""
        return read_commands(self.folder)

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Numbers of the training by name; see `RunNumbers.collect`.

        `tokens`, `step` and `skipped_steps` are those of the newest checkpoint, if there is one.
        """
        state = self.newest_checkpoint and self.newest_checkpoint.manifest.checkpoint
        found = {name: getattr(state, name) for name in ("step", "tokens", "skipped_steps")} if state else {}
        return found | self.step_numbers.collect(self.attempts)

    @cached_property
    def costs(self) -> list[StageCost]:
        """Costs of the stages, in the order in which they ran; the trainer's is the last."""
        corpora = (corpus.manifest.corpus for corpus in self.corpora.values())
        return compute_costs(self.recipe, corpora, self.cache, self.folder)

    @cached_property
    def phases(self) -> dict[str, list[Phase]]:
        """Timed phases of each stage, in the order in which the stages ran. A command that goes on ends where it is."""
        tokenizing = [phase for each in self.corpora.values() for phase in each.manifest.corpus.phases]
        cache = list(self.cache.manifest.compile_cache.phases) if self.cache else []
        training = divide_training(self.commands, read_events(self.folder), self.attempts, time.time())
        return {"tokenizer": tokenizing, "compiler": cache, "trainer": training}


def open_run(root: Path, name: str, verify: Verify = verify_checkpoint) -> Run:
    """Open a run that has a checkpoint, as `open_started_run` does. Raises `ArtifactError` if it has none yet."""
    run = open_started_run(root, name, verify)
    if run.newest_checkpoint is None:
        raise no_checkpoint_yet(checkpoint_collection(root, run.name))
    return run


def open_started_run(root: Path, name: str, verify: Verify = verify_checkpoint) -> Run:
    """Open the run of a name, or of a unique prefix, with its newest checkpoint that passes `verify`, if it has one.

    A caller that reads no weights passes `verify_sizes`, which reads no file of the checkpoint. Raises `RecipeError`
    where the name matches no run or several, and `ArtifactError` if the run's folder is lost.
    """
    name = find_run(root, name)
    folder = run_folder(root, name)
    if not (folder / RUN_FILE).exists():
        raise damaged_description(folder, "it is lost")
    described = read_description(folder)
    try:
        recipe = Recipe.model_validate_json(json.dumps(described.recipe))
        names = {name: f"corpus {name}" for name in corpus_weights(recipe)} | {recipe.corpus.name: "corpus"}
        corpora = {name: open_artifact(root / described.paths[key], CorpusManifest) for name, key in names.items()}
    except (ValueError, KeyError) as error:
        raise damaged_description(folder, error) from error
    described_corpus = describe_corpora(recipe, corpora)
    if (own := run_name(recipe, described_corpus, described.parent)) != name:
        raise damaged_description(folder, f"it describes the run {own}, expected {name}")
    checkpoint = newest_checkpoint(checkpoint_collection(root, name), verify)
    if checkpoint:
        require_of_run(checkpoint, recipe, described_corpus)
    cache_path = described.paths.get("compile_cache")
    cache = open_artifact(root / cache_path, CompileCacheManifest) if cache_path else None
    return Run(root, name, recipe, corpora, cache, described.parent, checkpoint)


def vocabulary_file(corpus: Artifact[CorpusManifest]) -> Path:
    """Return the vocabulary file of a corpus; it and those beside it are verified.

    Raises `ArtifactError` if one is damaged.
    """
    manifest = corpus.manifest
    path = Path(manifest.corpus.vocabulary.path)
    beside = [entry.path for entry in manifest.files if Path(entry.path).parent == path.parent]
    verify_files(corpus.path, manifest, paths=beside)
    return corpus.path / path
