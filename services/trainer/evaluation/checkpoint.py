"""Evaluates a checkpoint of any run on a corpus's validation split, and writes nothing into the run.

The workers and the graphs are those of training, so a compile cache serves both. A checkpoint of another layout is read
by slices.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.store import Artifact, open_artifact
from services.common.errors import ArtifactError, RecipeError
from services.common.hardware.faults import naming_hardware_faults
from services.common.launch.launcher import WorkerEnvironment, choose_launcher, run_workers
from services.common.problem_list import list_names
from services.common.process.telemetry import configure_logging
from services.common.program.step import Program
from services.common.recipe.changes import changed_fields
from services.common.recipe.schema import Recipe
from services.trainer.agreement import require_same_program
from services.trainer.checkpoints.loader import load_weights
from services.trainer.evaluation.records import describe_evaluation
from services.trainer.evaluation.validation import Validation
from services.trainer.job import Job
from services.trainer.runs.branch import require_same_vocabulary
from services.trainer.workers.node_staging import new_cache_files, prepare_node, using_node
from services.trainer.workers.start import describe_workers
from services.trainer.workers.worker import joined_group, make_backend, prepare_device

logger = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"
COLUMNS = ("", "loss", "standard error", "bits per byte", "perplexity", "tokens", "documents")


@dataclass(frozen=True)
class EvaluationJob:
    """Describes an evaluation to its workers."""

    job: Job
    """The command, with the corpus that is evaluated."""
    checkpoint: Path
    """Folder of the checkpoint. Rank 0 alone reads the manifest, which grows with the workers that wrote it."""
    content_digest: str
    num_tokens: int | None
    """Targets to evaluate; None for all."""
    folder: Path
    """Folder that all workers see, into which rank 0 writes RESULT_FILE."""


def evaluate_checkpoint(job: Job, checkpoint: Artifact[CheckpointManifest], num_tokens: int | None) -> dict[str, Any]:
    """Evaluate a checkpoint on the validation split of the job's corpus, and return its record.

    Raises `ArtifactError` where the checkpoint is damaged, or has another model or vocabulary than the recipe and the
    corpus, and the errors of the workers.
    """
    require_same_model(checkpoint, job.recipe)
    try:
        require_same_vocabulary(job.root, checkpoint, job.recipe, job.corpus)
    except RecipeError as error:  # of a branch; here the wrong corpus was named
        raise ArtifactError(f"{error} Pass the new corpus with --corpus.") from error
    if Validation(job.recipe, job.corpus, num_tokens).is_empty:
        raise ArtifactError(
            f"{job.corpus.path}: its validation split has no target to evaluate. Name another corpus of the same "
            f"tokenizer with --corpus; another corpus.validation_fraction makes the recipe that of another run."
        )
    shared = None if job.launch == "inline" else job.root  # for the result, where all workers see it
    with using_node(job), tempfile.TemporaryDirectory(prefix=".evaluate-", dir=shared) as name:
        folder = Path(name)
        spec = describe_workers(job.recipe, folder)
        logger.info("evaluating %s with %d workers (%s)", checkpoint.path, spec.num_workers, job.launch)
        described = EvaluationJob(job, checkpoint.path, checkpoint.manifest.content_digest, num_tokens, folder)
        run_workers(choose_launcher(job.launch), evaluate_as_worker, described, spec)
        evaluated = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    return {
        "checkpoint": str(checkpoint.path),
        "run": checkpoint.manifest.name,
        "step": checkpoint.manifest.checkpoint.step,
        "corpus": job.corpus.id,
        "corpus_path": ", ".join(str(part.path) for part in job.corpus.parts),
        **evaluated,
    }


def evaluate_as_worker(evaluation_job: EvaluationJob, environment: WorkerEnvironment) -> None:
    """Evaluate as one worker; rank 0 writes the result."""
    job = evaluation_job.job
    configure_logging("trainer", rank=environment.rank)
    with naming_hardware_faults(), joined_group(environment, prepare_device(job)) as group:
        group.wait_for_work(lambda: prepare_node(job))
        require_same_program(job, group)
        program = Program(job.recipe, make_backend(job, environment), draws_weights=False)
        load_weights(job, program, group, lambda: _open_checkpoint(evaluation_job))
        evaluation = Validation(job.recipe, job.corpus, evaluation_job.num_tokens).evaluate(program)
        misses = {
            "graphs_compiled": group.maximum(program.backend.graphs_compiled()),
            "new_cache_files": group.maximum(new_cache_files(job)),
        }
        if evaluation and group.rank == 0:
            result = json.dumps({**describe_evaluation(evaluation), **misses})
            (evaluation_job.folder / RESULT_FILE).write_text(result, encoding="utf-8")


def _open_checkpoint(evaluation_job: EvaluationJob) -> Artifact[CheckpointManifest]:
    """Open the checkpoint. Raises `ArtifactError` where it is another one than the command has read."""
    checkpoint = open_artifact(evaluation_job.checkpoint, CheckpointManifest)
    if checkpoint.manifest.content_digest != evaluation_job.content_digest:
        raise ArtifactError(f"{checkpoint.path}: its run has written this step again. Run the same command again.")
    return checkpoint


def describe_table(record: Mapping[str, Any]) -> str:
    """Return the numbers of an evaluation and of its sources as a table."""
    cells = [COLUMNS]
    for label, mean in (("all", record), *record["sources"].items()):
        numbers = (mean[name] for name in ("loss", "standard_error", "bits_per_byte"))
        shown = ("unknown" if number is None else f"{number:.4f}" for number in numbers)
        cells.append((label, *shown, f"{mean['perplexity']:,.2f}", f"{mean['tokens']:,}", f"{mean['documents']:,}"))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"checkpoint  {record['checkpoint']} (step {record['step']:,} of {record['run']})",
        f"corpus      {record['corpus_path']}, validation split",
        "",
        *("  ".join(f"{cell:{'<' if not at else '>'}{widths[at]}}" for at, cell in enumerate(row)) for row in cells),
    ]
    return "\n".join(line.rstrip() for line in lines)


def require_same_model(checkpoint: Artifact[CheckpointManifest], recipe: Recipe) -> None:
    """Raise `ArtifactError` unless the checkpoint was made for the recipe's model."""
    stored = checkpoint.manifest.recipe
    changed = [each for each in changed_fields(stored, recipe, "checkpoint") if each.startswith("model.")]
    if changed:
        raise ArtifactError(
            f"{checkpoint.path}: is another model's checkpoint than the run's: {list_names(changed)}. Name a run "
            f"of the same model as {checkpoint.manifest.name}, without overrides of model."
        )
    for name in ("attention_mask", "dtype", "param_dtype"):
        theirs, ours = stored["train"].get(name), getattr(recipe.train, name)
        if theirs != ours:
            what = f"{checkpoint.path} was trained with train.{name} = {theirs}, and is evaluated with {ours}"
            logger.warning("%s: the loss is not that of its run", what)
