"""Writes and reads evaluations.jsonl, which has one record for each evaluation of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.artifacts.manifest import write_durably
from services.common.process.progress import write_duration
from services.common.process.telemetry import JsonLines
from services.trainer.evaluation.losses import Evaluation
from services.trainer.job import Job
from services.trainer.metrics.records import read_lines

EVALUATIONS_FILE = "evaluations.jsonl"
EVALUATION_FIELDS = frozenset({"step", "time", "corpus", "seconds", "sources", "loss", "standard_error", "tokens"})
"""Fields that every line of EVALUATIONS_FILE has."""


def describe_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """Return the numbers of an evaluation, and under `sources` those of each source, as they are written."""
    described = asdict(evaluation) | {"perplexity": evaluation.perplexity}
    for label, mean in evaluation.sources.items():
        described["sources"][label]["perplexity"] = mean.perplexity
    return described


def metrics_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation's numbers by the names of METRICS, without unknown ones."""
    found = {
        "validation_loss": evaluation.loss,
        "validation_loss_standard_error": evaluation.standard_error,
        "validation_perplexity": evaluation.perplexity,
        "validation_bits_per_byte": evaluation.bits_per_byte,
        "validation_tokens": evaluation.tokens,
        "validation_loss_by_source": {label: mean.loss for label, mean in evaluation.sources.items()} or None,
        "evaluation_seconds": evaluation.seconds,
    }
    return {name: value for name, value in found.items() if value is not None}


def write_evaluation(
    run_folder: Path, step: int, trained_tokens: int, corpus: str, evaluation: Evaluation
) -> dict[str, Any]:
    """Append the record of the evaluation after `step` steps, and return it. Raises `OSError` if that fails."""
    record = {"step": step, "trained_tokens": trained_tokens, "time": time.time(), "corpus": corpus}
    record |= describe_evaluation(evaluation)
    lines = JsonLines(run_folder / EVALUATIONS_FILE)
    lines.append(record)
    lines.close()
    return record


def describe_record(record: Mapping[str, Any], began_at: float) -> str:
    """Return the line about a record of EVALUATIONS_FILE that people follow a run by."""
    bits, took = record["bits_per_byte"], write_duration(round(record["time"] - began_at))
    quality = f"perplexity {record['perplexity']:,.2f}" if bits is None else f"{bits:.3f} bits per byte"
    loss = f"validation loss {record['loss']:.3f}, {quality}"
    return f"step {record['step']:,}: {loss}, {record['trained_tokens']:,} tokens, {took}"


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """Return one record for each evaluated step, in order: the last one of a step that was evaluated again."""
    by_step = {record["step"]: record for record in read_lines(run_folder / EVALUATIONS_FILE, EVALUATION_FIELDS)}
    return [by_step[step] for step in sorted(by_step)]


def drop_evaluations_after(run_folder: Path, step: int) -> None:
    """Remove the records of later steps, which a run does again when it continues from `step`.

    A run that went back before a loss spike has other weights when it reaches those steps again.
    """
    found = read_evaluations(run_folder)
    kept = [record for record in found if record["step"] <= step]
    if len(kept) < len(found):
        write_durably(run_folder / EVALUATIONS_FILE, "".join(json.dumps(each) + "\n" for each in kept).encode())


def has_evaluation(run_folder: Path, step: int) -> bool:
    """Tell whether the run has a record of the evaluation after `step` steps."""
    return any(record["step"] == step for record in read_evaluations(run_folder))


def lacks_last_evaluation(job: Job, step: int) -> bool:
    """Tell whether a run that has done `step` steps was killed while it evaluated the last step of its recipe.

    A run without any record has lost its folder, or evaluates nothing.
    """
    steps = [record["step"] for record in read_evaluations(job.run_folder)]
    return step == job.recipe.train.max_steps and bool(steps) and step not in steps
