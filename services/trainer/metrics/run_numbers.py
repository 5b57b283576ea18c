"""Computes the numbers of a run that the summary and the report show, from the run's records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from services.trainer.evaluation.losses import perplexity

Record = Mapping[str, Any]

MEAN_STEPS = 100
"""Steps whose mean loss is the training loss of a run."""
NUM_BATCHES = 10
"""Batches of consecutive steps into which these steps are divided to estimate the error of their mean."""


class MeanTrainingLoss(NamedTuple):
    """Mean training loss of the last steps that updated the weights, in nats per token."""

    loss: float
    standard_error: float | None
    """Error of `loss` by the method of batch means; see `mean_of_batches`. None for a single step."""
    first_step: int
    last_step: int
    num_steps: int


def mean_training_loss(records: Sequence[Record]) -> MeanTrainingLoss | None:
    """Return the mean loss of the last MEAN_STEPS steps that updated the weights; None if there is no such step.

    Steps that were skipped do not count. Where the run has fewer steps these are all, but for the first ones that fill
    no batch of `mean_of_batches`.
    """
    applied = [each for each in records if _is_applied(each)]
    last = applied[-MEAN_STEPS:]
    if not last:
        return None
    num_batches = min(NUM_BATCHES, len(last))
    counted = last[len(last) % num_batches :]
    loss, error = mean_of_batches([record["loss"] for record in counted], num_batches)
    return MeanTrainingLoss(loss, error, counted[0]["step"], counted[-1]["step"], len(counted))


def _is_applied(record: Record) -> bool:
    return math.isfinite(record["gradient_norm"]) and math.isfinite(record["loss"])


def mean_of_batches(values: Sequence[float], num_batches: int) -> tuple[float, float | None]:
    """Return the mean of a series and its standard error by the method of batch means.

    The series is divided into batches of consecutive values, as many in each. The error is the standard deviation of
    the batches' means over the square root of their number (Law, Simulation Modeling and Analysis, section 9.5). Losses
    of neighbouring steps are correlated, because they are measured with almost the same weights; the error is right
    where the correlation is shorter than a batch, and also contains a trend of the series. One batch has no error.
    """
    size = len(values) // num_batches
    means = [math.fsum(values[first : first + size]) / size for first in range(0, num_batches * size, size)]
    error = statistics.stdev(means) / math.sqrt(num_batches) if num_batches > 1 else None
    return math.fsum(means) / num_batches, error


class RunNumbers:
    """Collects the numbers of a run's training from the records of its steps, in memory that does not grow with them.

    The records are added newest first, as `StepsNewestFirst` yields them.
    """

    def __init__(self) -> None:
        self._newest: Record | None = None
        self._oldest: Record | None = None
        self._last_applied: list[Record] = []
        self._efficiency = _Efficiency()
        self._seconds = 0.0
        self._stalls, self._stall_seconds = 0, 0.0

    def add(self, record: Record) -> None:
        """Add the record of the step before those that were added."""
        self._newest, self._oldest = self._newest or record, record
        if len(self._last_applied) < MEAN_STEPS and _is_applied(record):
            self._last_applied.append(record)
        self._efficiency.add(record)
        self._seconds += record["step_seconds"]
        if "checkpoint_stall_seconds" in record:
            self._stalls += 1
            self._stall_seconds += record["checkpoint_stall_seconds"]

    def collect(self, attempts: Sequence[Record]) -> dict[str, float]:
        """Return the numbers by name; a number that is unknown is left out.

        - `loss`, `loss_standard_error`, `loss_first_step`, `loss_last_step`, `loss_steps`: see `mean_training_loss`;
          `perplexity` is exp(`loss`). `first_loss` is the loss of the first recorded step. Bits per byte have
          evaluations alone: they leave BOS and EOS out, which a training loss includes.
        - `tokens_per_second`, `mfu`, `mfu_causal` and `data_share`: over all seconds of steps except the first of each
          process, which loads or compiles the graphs.
        - `training_seconds`: of all steps.
        - `goodput`, `restarts`: of the last step.
        - `checkpoint_stall_seconds`: the mean; `slowest_checkpoint_seconds`: the largest.
        - `graphs_compiled`, `new_cache_files`: sums over the starts of the workers that were not killed.
        """
        found: dict[str, float | None] = {}
        if self._oldest and self._newest:
            found |= {"first_step": self._oldest["step"], "first_loss": self._oldest["loss"]}
            found |= {name: self._newest[name] for name in ("goodput", "restarts")}
            found["training_seconds"] = self._seconds
        if mean := mean_training_loss(self._last_applied[::-1]):
            found |= {
                "loss": mean.loss,
                "loss_standard_error": mean.standard_error,
                "loss_first_step": mean.first_step,
                "loss_last_step": mean.last_step,
                "loss_steps": mean.num_steps,
                "perplexity": perplexity(mean.loss),
            }
        found |= self._efficiency.collect()
        if self._stalls:
            found["checkpoint_stall_seconds"] = self._stall_seconds / self._stalls
        if attempts:
            found["slowest_checkpoint_seconds"] = max(each.get("slowest_checkpoint_seconds", 0.0) for each in attempts)
            found |= {name: sum(each[name] for each in attempts) for name in ("graphs_compiled", "new_cache_files")}
        return {name: value for name, value in found.items() if value is not None}


def compute_efficiency(records: Iterable[Record]) -> dict[str, float]:
    """Return the numbers of `RunNumbers` about speed; empty if only first steps of processes are recorded."""
    efficiency = _Efficiency()
    for record in records:
        efficiency.add(record)
    return efficiency.collect()


class _Efficiency:
    def __init__(self) -> None:
        self._tokens, self._seconds, self._data_seconds = 0, 0.0, 0.0
        self._worked = dict.fromkeys(("mfu", "mfu_causal"), 0.0)
        self._known_seconds = dict.fromkeys(self._worked, 0.0)

    def add(self, record: Record) -> None:
        if record["is_first_of_process"]:
            return
        seconds = record["step_seconds"]
        self._tokens += record["step_tokens"]
        self._seconds += seconds
        self._data_seconds += record["data_seconds"]
        for name in self._worked:
            if name in record:  # unknown where a device's peak is unknown
                self._worked[name] += record[name] * seconds
                self._known_seconds[name] += seconds

    def collect(self) -> dict[str, float]:
        if not self._seconds:
            return {}
        shares = {name: worked / self._known_seconds[name] for name, worked in self._worked.items() if worked}
        speed = {"tokens_per_second": self._tokens / self._seconds, "data_share": self._data_seconds / self._seconds}
        return {**speed, **shares}
