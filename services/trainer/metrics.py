"""One record per step: JSON lines are the truth, TensorBoard is a view of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorboardX

from services.common.telemetry import JsonLines, read_json_lines

METRICS_FILE = "metrics.jsonl"
ATTEMPTS_FILE = "attempts.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """What the loop knows of a step; losses in nats per token, gradient norm before clipping."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    data_seconds: float
    skipped_steps: int
    is_first_of_process: bool
    """The first step of a process loads or compiles its graphs."""


class MetricsWriter:
    """Appends to `metrics.jsonl` and `tensorboard/` of a run."""

    def __init__(self, run_folder: Path, first_step: int) -> None:
        self._run_folder = run_folder
        self._lines = JsonLines(run_folder / METRICS_FILE)
        self._board = tensorboardX.SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step)

    def log(self, record: dict[str, Any]) -> None:
        """Write the record of one step; its `step` counts the optimizer steps that are done."""
        self._lines.append(record)
        for name, value in record.items():
            if name != "step" and isinstance(value, float):
                self._board.add_scalar(name, value, record["step"])

    def log_attempt(self, record: dict[str, Any]) -> None:
        """Write how one start of the workers ended, with its compile misses. A killed attempt leaves none."""
        attempts = JsonLines(self._run_folder / ATTEMPTS_FILE)
        attempts.append(record)
        attempts.close()

    def close(self) -> None:
        self._lines.close()
        self._board.close()


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """One record per step, in order. A step that was done again after a crash counts once, as done last."""
    by_step = {record["step"]: record for record in read_json_lines(run_folder / METRICS_FILE)}
    return [by_step[step] for step in sorted(by_step)]


def read_attempts(run_folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(run_folder / ATTEMPTS_FILE)


def mean_tokens_per_second(records: list[dict[str, Any]]) -> float:
    """Over all steps but the first of each process, which loads the compiled graphs."""
    counted = [record for record in records if not record["is_first_of_process"]]
    seconds = sum(record["step_seconds"] for record in counted)
    return sum(record["step_tokens"] for record in counted) / seconds if seconds else 0.0
