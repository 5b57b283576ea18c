"""Computes the numbers of a run that the summary and the report show, from the run's records."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.evaluation.losses import perplexity

Record = Mapping[str, Any]

MEAN_STEPS = 100
"""Steps whose mean loss is the training loss of a run."""
NUM_BATCHES = 10
"""Batches of consecutive steps into which these steps are divided to estimate the error of their mean."""


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
    means = [
        math.fsum(each["loss"] for each in counted[first : first + size]) / size
        for first in range(0, len(counted), size)
    ]
    loss = math.fsum(means) / num_batches
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
    """Collects the numbers of a run's training from the records of its steps, in memory that does not grow with them.

    The records are added newest first, as `StepsNewestFirst` yields them.
    """

    def __init__(self) -> None:
        self._newest: Record = {}
        self._oldest: Record = {}
        self._last_applied: list[Record] = []
        self._sums: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Add the record of the step before those that were added."""
        self._newest, self._oldest = self._newest or record, record
        is_applied = math.isfinite(record["gradient_norm"]) and math.isfinite(record["loss"])
        if is_applied and len(self._last_applied) < MEAN_STEPS:
            self._last_applied.append(record)
        sums, seconds = self._sums, record["step_seconds"]
        sums["training_seconds"] += seconds
        if "checkpoint_stall_seconds" in record:
            sums["stalls"] += 1
            sums["stall_seconds"] += record["checkpoint_stall_seconds"]
        if record["is_first_of_process"]:  # loads or compiles the graphs
            return
        sums["tokens"] += record["step_tokens"]
        sums["seconds"] += seconds
        sums["data_seconds"] += record["data_seconds"]
        for name in ("mfu", "mfu_causal"):
            if name in record:  # unknown where a device's peak is unknown
                sums[name] += record[name] * seconds
                sums[f"{name}_seconds"] += seconds

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
        found, sums = mean_training_loss(self._last_applied[::-1]), self._sums
        if self._newest:
            found |= {"first_step": self._oldest["step"], "first_loss": self._oldest["loss"]}
            found |= {name: self._newest[name] for name in ("goodput", "restarts")}
            found["training_seconds"] = sums["training_seconds"]
        if seconds := sums["seconds"]:
            found |= {"tokens_per_second": sums["tokens"] / seconds, "data_share": sums["data_seconds"] / seconds}
        found |= {name: sums[name] / sums[f"{name}_seconds"] for name in ("mfu", "mfu_causal") if sums[name]}
        if sums["stalls"]:
            found["checkpoint_stall_seconds"] = sums["stall_seconds"] / sums["stalls"]
        if attempts:
            found["slowest_checkpoint_seconds"] = max(each.get("slowest_checkpoint_seconds", 0.0) for each in attempts)
            found |= {name: sum(each[name] for each in attempts) for name in ("graphs_compiled", "new_cache_files")}
        return found
