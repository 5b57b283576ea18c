"""Decides whether a command starts lost workers again.

The decision is a function of numbers alone, so that `benchmarks.trainer.failure_simulation` makes the same decision in
virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RestartBudget:
    """The restarts that a command still has. Each checkpoint gives all of them back: a run of weeks has many losses."""

    max_restarts: int
    """Value of `train.max_restarts`: the most restarts between two checkpoints."""
    committed_step: int
    """Step of the newest checkpoint that is known; 0 before the first one."""
    restarts: int = 0
    """Restarts since that checkpoint."""

    def see_checkpoint(self, committed_step: int) -> RestartBudget:
        """Return the budget at a loss of the workers, when the newest checkpoint is that of `committed_step`."""
        has_progress = committed_step > self.committed_step
        return replace(self, committed_step=committed_step, restarts=0 if has_progress else self.restarts)

    @property
    def is_spent(self) -> bool:
        """Whether the next loss of the workers ends the command."""
        return self.restarts >= self.max_restarts

    def take_restart(self) -> RestartBudget:
        """Return the budget after one more restart. Raises `ValueError` where none is left."""
        if self.is_spent:
            raise ValueError(f"no restart is left of {self.max_restarts} since step {self.committed_step}")
        return replace(self, restarts=self.restarts + 1)
