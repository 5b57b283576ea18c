"""Measures a run's health at an interval: clipping, norms of layer groups, the largest logit and activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.program.micro_batch import MicroBatch
from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.trainer.metrics.records import StepRecord


class HealthMeasurement:
    """Counts clipped steps, and measures a program after the steps that `train.health_interval_steps` asks for.

    A measurement costs a forward pass over the global batch of its step, so a third of a step, and a pass over weights
    and moments. It changes no bit of the training. Its numbers are the same for every number of model replicas.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._num_steps, self._num_clipped = recipe, 0, 0

    def count(self, step: StepRecord, is_applied: bool) -> None:
        """Count a step; one that was not applied has no gradient to clip."""
        self._num_steps += is_applied
        self._num_clipped += is_applied and step.gradient_norm > self._recipe.optimizer.max_grad_norm

    def is_due(self, step: int) -> bool:
        """Return whether to measure after `step` steps: at the interval, and after the run's last step."""
        interval = self._recipe.train.health_interval_steps
        return interval > 0 and (step % interval == 0 or step == self._recipe.train.max_steps)

    def measure(
        self, program: Program, step: StepRecord, is_applied: bool, micro_batches: Sequence[MicroBatch]
    ) -> dict[str, Any]:
        """Return the metrics of the step that the program has just taken, with this rank's micro-batches.

        A step that was not applied has no update and no gradient to measure. All workers call this together, and get
        the same numbers.
        """
        found: dict[str, Any] = {}
        if self._num_steps:
            found["clipped_share"] = self._num_clipped / self._num_steps
            self._num_steps = self._num_clipped = 0
        health = program.measure_health(step.step - 1, step.skipped_steps, is_applied, micro_batches)
        found |= {"largest_logit": health.largest_logit, "activation_rms": health.activation_rms}
        if is_applied:
            found |= {
                "gradient_norm_by_group": health.gradient_norms,
                "update_ratio_by_group": health.update_ratios,
            }
        return found
