"""Decides for all workers together whether a run stops early.

After every step rank 0 checks the run's stop file and the time limit. While the workers take the next step they agree
on the reason, so all of them stop after that step, with one checkpoint.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.errors import Interrupted, MillraceError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.trainer.job import Job

logger = logging.getLogger(__name__)

STOP_FILE = "stop"


class StopConditions:
    """Checks the reasons to stop, which rank 0 alone looks for."""

    def __init__(self, job: Job, environment: WorkerEnvironment) -> None:
        self._job, self._rank = job, environment.rank

    def check(self) -> StopReason:
        """Return the strongest reason that there is; NONE on all ranks but 0."""
        if self._rank != 0:
            return StopReason.NONE
        return max(read_request(self._job.run_folder), self._read_clock())

    def _read_clock(self) -> StopReason:
        limit = self._job.recipe.train.time_limit_seconds
        elapsed_seconds = (datetime.now(UTC) - self._job.started_at).total_seconds()
        return StopReason.TIME_LIMIT if limit and elapsed_seconds >= limit else StopReason.NONE


def request_stop(run_folder: Path, reason: StopReason) -> None:
    """Ask the workers to stop, by a file in the run's folder that workers on all nodes see.

    A stronger request that is there already stays. Raises `OSError`.
    """
    if read_request(run_folder) < reason:
        write_durably(run_folder / STOP_FILE, reason.name.encode())


def clear_stop(run_folder: Path) -> None:
    """Remove the request after the run has stopped."""
    (run_folder / STOP_FILE).unlink(missing_ok=True)


def forget_signals(run_folder: Path) -> None:
    """Remove the request of a signal or a preemption to an earlier command. A person's stays, with a warning."""
    reason = read_request(run_folder)
    if reason > StopReason.STOP_FILE:
        clear_stop(run_folder)
    elif reason:
        logger.warning("%s exists: the run stops after its first step, with a checkpoint", run_folder / STOP_FILE)


def stopped(reason: StopReason, when: str) -> MillraceError:
    """Make the error of a run that stopped early. Its exit code is 75, or 130 for Ctrl-C."""
    kind = Interrupted if reason is StopReason.INTERRUPT else TryAgain
    cause = {StopReason.SIGTERM: "SIGTERM", StopReason.INTERRUPT: "Ctrl-C"}.get(reason, str(reason))
    return kind(f"Stopped by {cause} {when}. The same command continues.")


def read_request(run_folder: Path) -> StopReason:
    """Read the stop file. One that `request_stop` wrote names its reason; any other is a person's."""
    try:
        written = (run_folder / STOP_FILE).read_bytes()
    except FileNotFoundError:
        return StopReason.NONE
    signals = {reason.name.encode(): reason for reason in StopReason if reason > StopReason.STOP_FILE}
    return signals.get(written, StopReason.STOP_FILE)
