"""Decides whether lost workers start again: a budget between two checkpoints, and the policy that spends it.

The budget is a function of numbers alone, so that `benchmarks.trainer.failure_simulation` makes the same decision in
virtual time. The module imports no torch: with Ray it is the agent of one node that asks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.errors import WorkersLost
from services.common.process.shutdown import StopReason
from services.trainer.checkpoints.steps import newest_step
from services.trainer.health.heartbeats import find_hang
from services.trainer.job import Job
from services.trainer.metrics.events import count_restarts, record_event
from services.trainer.metrics.records import read_last_step
from services.trainer.supervision.stop import read_request, stopped


@dataclass
class RestartBudget:
    """The restarts that a command still has. Each checkpoint gives all of them back: a run of weeks has many losses."""

    max_restarts: int
    """Value of `train.max_restarts`: the most restarts between two checkpoints."""
    committed_step: int
    """Step of the newest checkpoint that is known; 0 before the first one."""
    restarts: int = 0
    """Restarts since that checkpoint."""

    def take(self, committed_step: int) -> bool:
        """Take a restart when the newest checkpoint is that of `committed_step`. Return False if none is left."""
        if committed_step > self.committed_step:
            self.committed_step, self.restarts = committed_step, 0
        if self.restarts >= self.max_restarts:
            return False
        self.restarts += 1
        return True


class RestartPolicy:
    """Decides before each start of the workers whether they start; see `WorkerGroup.restart_policy`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._budget = RestartBudget(job.recipe.train.max_restarts, newest_step(job.checkpoint_collection) or 0)

    def __call__(self, loss: str) -> int:
        """Return the number of the start, and record a restart.

        Raises `WorkersLost` when the restarts are spent, and the error of a stop that was requested before the loss.
        """
        # The policy of a node that was lost may have allowed starts before.
        job = replace(self._job, start_number=max(self._job.start_number, count_restarts(self._job)))
        if not loss:
            return job.start_number
        if hang := find_hang(job):
            loss = f"{hang.message}\n{loss}"
            record_event(job, "watchdog", **hang._asdict())
        if (reason := read_request(job.run_folder)) > StopReason.STOP_FILE:
            raise stopped(reason, f"after the workers were lost ({loss})")
        if not self._budget.take(newest_step(job.checkpoint_collection) or 0):
            raise WorkersLost(
                f"workers were lost {self._budget.restarts + 1} times, train.max_restarts is "
                f"{self._budget.max_restarts}. The last loss: {loss}\nThe same command continues from the newest "
                f"checkpoint."
            )
        from_step = self._budget.committed_step
        lost_steps = max(0, int((read_last_step(job.run_folder) or {}).get("step", 0)) - from_step)
        counts = {"restarts": self._budget.restarts, "from_step": from_step, "lost_steps": lost_steps}
        record_event(job, "restart", **counts, cause=loss.splitlines()[0])
        self._job = replace(job, start_number=job.start_number + 1)
        return self._job.start_number
