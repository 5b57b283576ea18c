"""Why a run stops early, decided for all workers at once.

Each worker looks at what it can see; the largest of their reasons, reduced over the group after every step,
is everybody's. So all workers leave at the same step, with one checkpoint.
"""

from __future__ import annotations

import enum
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.errors import Interrupted, MillraceError, TryAgain
from services.common.launch.launcher import WorkerEnvironment, choose_launcher
from services.trainer.job import Job

STOP_FILE = "stop"
# Ray answers through one actor and a barrier over all workers (9 ms), so it is not asked after every step.
PREEMPTION_INTERVAL_STEPS = 10


class StopReason(enum.IntEnum):
    NONE = 0
    TIME_LIMIT = 1
    PREEMPTION = 2
    STOP_FILE = 3
    SIGTERM = 4
    INTERRUPT = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class StopWatch:
    """One worker's view of the reasons to stop."""

    def __init__(self, job: Job, environment: WorkerEnvironment) -> None:
        self._job = job
        self._environment = environment
        self._file = job.run_folder / STOP_FILE
        self._is_terminated = False
        if threading.current_thread() is threading.main_thread():  # Ray calls a worker in another thread
            signal.signal(signal.SIGTERM, self._terminate)

    def look(self, step: int) -> StopReason:
        """The strongest reason that this worker sees. Called after every step, by every worker."""
        reasons = [StopReason.NONE]
        if self._is_terminated:
            reasons.append(StopReason.SIGTERM)
        if step % PREEMPTION_INTERVAL_STEPS == 0 and choose_launcher(self._environment.launch).is_preemption_noticed():
            reasons.append(StopReason.PREEMPTION)
        if self._environment.rank == 0:
            reasons += [self._read_file(), self._read_clock()]
        return max(reasons)

    def _read_file(self) -> StopReason:
        if not self._file.exists():
            return StopReason.NONE
        written = self._file.read_text(encoding="utf-8").strip()
        return StopReason[written] if written in StopReason.__members__ else StopReason.STOP_FILE

    def _read_clock(self) -> StopReason:
        limit = self._job.recipe.train.time_limit_seconds
        elapsed = (datetime.now(UTC) - self._job.started_at).total_seconds()
        return StopReason.TIME_LIMIT if limit and elapsed >= limit else StopReason.NONE

    def _terminate(self, signum: int, frame: object) -> None:
        self._is_terminated = True


def request_stop(run_folder: Path, reason: StopReason) -> None:
    """Ask the workers to stop, through the file system: it reaches Ray workers on any node."""
    write_durably(run_folder / STOP_FILE, reason.name.encode())


def clear_stop(run_folder: Path) -> None:
    """The request has been carried out."""
    (run_folder / STOP_FILE).unlink(missing_ok=True)


def forget_signals(run_folder: Path) -> None:
    """Drop a request that a signal to an earlier command left; a stop file that a person made is kept."""
    path = run_folder / STOP_FILE
    if path.exists() and path.read_text(encoding="utf-8").strip() in StopReason.__members__:
        path.unlink()


def stopped(reason: StopReason, step: int) -> MillraceError:
    """What a stopped run ends with: exit 75, or 130 for Ctrl-C."""
    kind = Interrupted if reason is StopReason.INTERRUPT else TryAgain
    return kind(f"Stopped by {reason} after step {step}; its checkpoint is committed. The same command continues.")
