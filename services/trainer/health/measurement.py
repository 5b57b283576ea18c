"""Measures a run's health at an interval: clipping, norms of layer groups, the largest logit and activations."""

from __future__ import annotations

from typing import Any

from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.trainer.agreement import TakenStep


class HealthMeasurement:
    """Counts clipped steps, and measures a program after the steps that `train.health_interval_steps` asks for.

    A measurement costs a forward pass over the global batch of its step, so a third of a step, and a pass over weights
    and moments. It changes no bit of the training.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._num_steps, self._num_clipped = recipe, 0, 0

    def count(self, step: TakenStep) -> None:
        """Count a step; one that was not applied has no gradient to clip."""
        self._num_steps += step.is_applied
        self._num_clipped += step.is_applied and step.record.gradient_norm > self._recipe.optimizer.max_grad_norm

    def is_due(self, step: int) -> bool:
        """Return whether to measure after `step` steps: at the interval, and after the run's last step."""
        interval = self._recipe.train.health_interval_steps
        return interval > 0 and (step % interval == 0 or step == self._recipe.train.max_steps)

    def measure(self, program: Program, step: TakenStep) -> dict[str, Any]:
        """Return the metrics of the step that the program has just taken. All workers call this together.

        A step that was not applied has no update and no gradient to measure.
        """
        found: dict[str, Any] = {}
        if self._num_steps:
            found["clipped_share"] = self._num_clipped / self._num_steps
            self._num_steps = self._num_clipped = 0
        record = step.record
        health = program.measure_health(record.step - 1, record.skipped_steps, step.is_applied, step.micro_batches)
        found |= {"largest_logit": health.largest_logit, "activation_rms": health.activation_rms}
        if step.is_applied:
            found |= {
                "gradient_norm_by_group": health.gradient_norms,
                "update_ratio_by_group": health.update_ratios,
            }
        return found
