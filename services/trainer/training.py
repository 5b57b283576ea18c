"""Trains a run: from its newest checkpoint or from step 0, to the recipe's max_steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import Artifact
from services.common.artifacts.upstream import stage_command
from services.common.errors import ArtifactError, MillraceError, adding_path
from services.common.program.backends.slow_paths import slow_paths
from services.common.recipe.derived import check_epochs, check_schedule
from services.trainer.checkpoints.lookup import newest_checkpoint, run_command, verify_sizes, verify_state
from services.trainer.checkpoints.retention import discard_left_over
from services.trainer.evaluation.records import lacks_last_evaluation
from services.trainer.job import Job, completed_step, require_own_program
from services.trainer.metrics.commands import recording_command
from services.trainer.report.run_report import write_report
from services.trainer.runs.branch import describe_parent, open_parent, require_same_vocabulary
from services.trainer.runs.description import write_run
from services.trainer.runs.run import REPORT_FILE, open_run
from services.trainer.runs.start import explain_new_run
from services.trainer.runs.status import read_status
from services.trainer.runs.summary import describe_skips
from services.trainer.supervision.supervise import notifying_run, supervise
from services.trainer.workers.node_staging import prepare_node, using_node

logger = logging.getLogger(__name__)

Export = Callable[[Job], AbstractContextManager[None]]
"""Exports the metrics of a job while its workers train."""


def train_run(job: Job, recipe_path: Path, export: Export) -> int:
    """Train under the run's lock, write the report, and return 0.

    A run that is complete is only reported, where a killed command has not done so. `recipe_path` is for messages.
    """
    job.run_folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(job.lock), recording_command(job), using_node(job):
        discard_left_over(job.checkpoint_collection)
        checkpoint = newest_checkpoint(job.checkpoint_collection, verify_sizes)  # the workers verify what they load
        is_reported = checkpoint is not None and _is_reported(job, checkpoint)
        if checkpoint and _is_complete(job, checkpoint) and not is_reported:
            # The command that wrote it was killed, so its files are read once. Later commands compare sizes alone.
            checkpoint = newest_checkpoint(job.checkpoint_collection, verify_state(job.recipe, job.corpus))
        if checkpoint and _is_complete(job, checkpoint):
            write_run(job)
            if not is_reported:
                report_training(job)
            steps = f"step {completed_step(checkpoint)} of {job.recipe.train.max_steps}"
            print(f"the run is complete: {steps}, {job.checkpoint_collection}\n{_describe_end(job)}")
            return 0
        if checkpoint:
            require_own_program(job, checkpoint)
        else:
            _check_start(job, recipe_path)
        write_run(job)
        _warn_of_recipe(job)
        prepare_node(job)
        with export(job), adding_path(job.root), notifying_run(job, recipe_path) as observe:
            supervise(replace(job, workers_started_at=datetime.now(UTC)), observe)
        discard_left_over(job.checkpoint_collection)
    report_training(job)
    print(f"trained to step {job.recipe.train.max_steps}: {job.checkpoint_collection}\n{_describe_end(job)}")
    return 0


def _is_complete(job: Job, checkpoint: Artifact[CheckpointManifest]) -> bool:
    step = completed_step(checkpoint)
    return step >= job.recipe.train.max_steps and not lacks_last_evaluation(job, step)


def _is_reported(job: Job, checkpoint: Artifact[CheckpointManifest]) -> bool:
    report = job.run_folder / REPORT_FILE
    return report.exists() and report.stat().st_mtime_ns >= (checkpoint.path / MANIFEST).stat().st_mtime_ns


def _warn_of_recipe(job: Job) -> None:
    recipe = job.recipe
    warnings = [check_schedule(recipe), check_epochs(recipe, job.corpus.payloads)]
    for warning in filter(None, [*warnings, *slow_paths(recipe).values()]):
        logger.warning("%s", warning)


def _check_start(job: Job, recipe_path: Path) -> None:
    """Say what a run without a checkpoint starts with. Raises `ArtifactError` if the weights or the checkpoint with
    which it starts are missing.
    """
    recipe = job.recipe
    if recipe.train.initial_weights:
        raise ArtifactError(
            f"{job.run}: starts with imported weights (train.initial_weights), which are not imported yet. Import "
            f"them: `{stage_command('trainer', recipe_path, job.root, 'import', '--from', 'FOLDER')}`"
        )
    if recipe.train.branch:
        parent = open_parent(job.root, recipe.train.branch)
        require_same_vocabulary(job.root, parent, recipe, job.corpus)
        logger.info("%s branches from %s", job.run, describe_parent(job.root, recipe, job.corpus, job.lineage))
    elif before := explain_new_run(job.root, recipe, job.corpus):
        logger.info("%s is a new run and does not continue %s", job.run, before)


def _describe_end(job: Job) -> str:
    """Return the lines with which a command that has completed its run ends: losses, report and what is next."""
    status, report = read_status(job.root, job.run), job.run_folder / REPORT_FILE
    losses = {"training": status.loss, "validation": status.validation_loss}
    rows = {
        "loss": ", ".join(f"{loss:.3f} in {name}" for name, loss in losses.items() if loss is not None),
        "report": str(report) if report.exists() else run_command(job.root, "report", job.run),
        "next": run_command(job.root, "sample", job.run),
    }
    return "\n".join(f"  {name:<11} {text}" for name, text in rows.items())


def report_training(job: Job) -> None:
    """Write the report of a complete run. The report is a view: if it fails, the training has still succeeded.

    It reads no weights, because the command's node may be too small for them.
    """
    try:
        run = open_run(job.root, job.run, verify_sizes)
        if run.checkpoint.manifest.checkpoint.skipped_steps:
            logger.warning("skipped: %s", describe_skips(run))
        write_report(run)
    except Exception as error:
        expected = isinstance(error, MillraceError | OSError)
        logger.warning(
            "the training is complete, but its report could not be written: %s. Write it with `%s`",
            error,
            run_command(job.root, "report", job.run),
            exc_info=not expected,  # a bug gets its traceback, and the training still counts
        )
