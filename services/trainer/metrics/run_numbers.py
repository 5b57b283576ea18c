"""Computes the numbers of a run that the summary and the report show, from the run's records."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.evaluation.losses import perplexity
from services.trainer.metrics.records import steps_newest_first

Record = Mapping[str, Any]

MEAN_STEPS = 100
"""Steps whose mean loss is the training loss of a run."""
NUM_BATCHES = 10
"""Batches of consecutive steps into which these steps are divided to estimate the error of their mean."""
_MEANS = ("tokens_per_second", "data_share", "mfu", "mfu_causal")
"""Metrics of which the mean over all seconds of steps is taken."""


def mean_training_loss(applied: Sequence[Record]) -> dict[str, float]:
    """Return the mean loss of the last MEAN_STEPS of the steps that updated the weights, oldest first.

    The steps are divided into NUM_BATCHES batches, as many in each; a remainder of the oldest steps is left out. The
    standard error is the standard deviation of the batches' means over the square root of their number (Law,
    Simulation Modeling and Analysis, section 9.5): losses of neighbouring steps are correlated, because they are
    measured with almost the same weights. A single step has no error. Empty without a step.
    """
    last = applied[-MEAN_STEPS:]
    if not last:
        return {}
    num_batches = min(NUM_BATCHES, len(last))
    size = len(last) // num_batches
    counted = last[-num_batches * size :]
    losses = [each["loss"] for each in counted]
    means = [statistics.fmean(losses[first : first + size]) for first in range(0, len(losses), size)]
    loss = statistics.fmean(means)
    error = {"loss_standard_error": statistics.stdev(means) / math.sqrt(num_batches)} if num_batches > 1 else {}
    return {
        "loss": loss,
        **error,
        "loss_first_step": counted[0]["step"],
        "loss_last_step": counted[-1]["step"],
        "loss_steps": len(counted),
        "perplexity": perplexity(loss),
    }


class RunNumbers:
    """The numbers of a run's training. Their memory does not grow with its steps, which are read once."""

    def __init__(self, run_folder: Path, observe: Callable[[Record], None] = lambda _: None) -> None:
        """Read the records of all steps, newest first, and pass each to `observe`."""
        self._newest: Record = {}
        self._oldest: Record = {}
        self._last_applied: list[Record] = []
        self._training_seconds = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._weights: defaultdict[str, float] = defaultdict(float)
        for record in steps_newest_first(run_folder):
            self._add(record)
            observe(record)

    def _add(self, record: Record) -> None:
        self._newest, self._oldest = self._newest or record, record
        is_applied = math.isfinite(record["gradient_norm"]) and math.isfinite(record["loss"])
        if is_applied and len(self._last_applied) < MEAN_STEPS:
            self._last_applied.append(record)
        seconds: float = record["step_seconds"]
        self._training_seconds += seconds
        # The first step of a process loads or compiles the graphs.
        means = () if record["is_first_of_process"] else _MEANS
        for name, weight in [*((name, seconds) for name in means), ("checkpoint_stall_seconds", 1.0)]:
            if name in record:  # MFU is unknown where a device's peak is unknown
                self._sums[name] += record[name] * weight
                self._weights[name] += weight

    def collect(self, attempts: Sequence[Record]) -> dict[str, float]:
        """Return the numbers by name; a number that is unknown is left out.

        - `loss`, `loss_standard_error`, `loss_first_step`, `loss_last_step`, `loss_steps`: see `mean_training_loss`;
          `perplexity` is exp(`loss`). `first_loss` is the loss of the first recorded step. Bits per byte have
          evaluations alone: they leave BOS and EOS out, which a training loss includes.
        - `tokens_per_second`, `mfu`, `mfu_causal` and `data_share`: over all seconds of steps except the first of each
          process.
        - `training_seconds`: of all steps.
        - `goodput`, `restarts`: of the last step.
        - `checkpoint_stall_seconds`: the mean; `slowest_checkpoint_seconds`: the largest.
        - `graphs_compiled`, `new_cache_files`: sums over the starts of the workers that were not killed.
        """
        found = mean_training_loss(self._last_applied[::-1])
        found |= {name: self._sums[name] / weight for name, weight in self._weights.items() if weight}
        if self._newest:
            found |= {"first_step": self._oldest["step"], "first_loss": self._oldest["loss"]}
            found |= {name: self._newest[name] for name in ("goodput", "restarts")}
            found["training_seconds"] = self._training_seconds
        if attempts:
            found["slowest_checkpoint_seconds"] = max(each.get("slowest_checkpoint_seconds", 0.0) for each in attempts)
            found |= {name: sum(each[name] for each in attempts) for name in ("graphs_compiled", "new_cache_files")}
        return found
