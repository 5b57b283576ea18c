"""Decides about each start of a run's workers, and reads what they have reached, on the node with rank 0.

It imports no program and no torch: with Ray that node's agent calls it, and the agent's own start should be short.
"""

from __future__ import annotations

from dataclasses import replace

from services.common.errors import WorkersLost
from services.common.launch.launcher import TrainingReport
from services.trainer.checkpoints.steps import newest_step
from services.trainer.health.silence import find_hang
from services.trainer.job import Job
from services.trainer.metrics.events import count_restarts, record_event
from services.trainer.metrics.records import read_last_step
from services.trainer.restarts import RestartBudget
from services.trainer.stop import requested_stop, stopped_by_loss

REPORTED = ("step", "loss", "learning_rate", "tokens_per_second", "validation_loss")
"""Fields of a step's record that a Ray cluster is told."""


class StartPlan:
    """Decides before each start of the workers whether they start; see `WorkerGroup.plan_start`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._budget = RestartBudget(job.recipe.train.max_restarts, newest_step(job.checkpoint_collection) or 0)

    def __call__(self, loss: str) -> int:
        """Return the number of the start, and record a restart.

        Raises `WorkersLost` when the restarts are spent, and the error of a stop that was requested before the loss.
        """
        # The plan of a node that was lost may have planned starts before.
        job = replace(self._job, start_number=max(self._job.start_number, count_restarts(self._job)))
        if not loss:
            return job.start_number
        if hang := find_hang(job):
            loss = f"{hang.message}\n{loss}"
            record_event(job, "watchdog", **hang._asdict())
        if reason := requested_stop(job.run_folder):
            raise stopped_by_loss(reason, loss)
        self._budget = self._budget.see_checkpoint(newest_step(job.checkpoint_collection) or 0)
        if self._budget.is_spent:
            raise WorkersLost(
                f"workers were lost {self._budget.restarts + 1} times, train.max_restarts is "
                f"{self._budget.max_restarts}. The last loss: {loss}\nThe same command continues from the newest "
                f"checkpoint."
            )
        self._budget = self._budget.take_restart()
        from_step = self._budget.committed_step
        lost_steps = max(0, int((read_last_step(job.run_folder) or {}).get("step", 0)) - from_step)
        counts = {"restarts": self._budget.restarts, "from_step": from_step, "lost_steps": lost_steps}
        record_event(job, "restart", **counts, cause=loss.splitlines()[0])
        self._job = replace(job, start_number=job.start_number + 1)
        return self._job.start_number


def read_report(job: Job) -> TrainingReport | None:
    """Return the newest record of the run and its newest checkpoint; None before the first step."""
    record, step = read_last_step(job.run_folder), newest_step(job.checkpoint_collection)
    if record is None:
        return None
    reported = {name: float(record[name]) for name in REPORTED if isinstance(record.get(name), int | float)}
    return TrainingReport(reported, job.checkpoint_address(step).path if step else None)
