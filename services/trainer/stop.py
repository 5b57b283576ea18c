"""Why a run stops early, decided for all workers at once.

Each worker looks at what it can see; the largest of their reasons, reduced over the group after every step,
is everybody's. So all workers leave at the same step, with one checkpoint.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import stat
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.errors import Interrupted, MillraceError, TryAgain
from services.common.input.files import open_regular_file
from services.common.launch.launcher import WorkerEnvironment, choose_launcher
from services.trainer.job import Job

logger = logging.getLogger(__name__)

STOP_FILE = "stop"
# Ray answers through one actor and a barrier over all workers (9 ms), so it is not asked after every step.
PREEMPTION_INTERVAL_STEPS = 10


class StopReason(enum.IntEnum):
    NONE = 0
    TIME_LIMIT = 1
    PREEMPTION = 2
    STOP_FILE = 3
    # Signals to the command, which it hands on through the stop file.
    SIGTERM = 4
    INTERRUPT = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class StopConditions:
    """One worker's view of the reasons to stop."""

    def __init__(self, job: Job, environment: WorkerEnvironment) -> None:
        self._job = job
        self._environment = environment
        self._file = job.run_folder / STOP_FILE
        self._is_terminated = False
        # From here on by a clock that nobody sets; the command may have begun on another machine.
        before_seconds = max(0.0, (datetime.now(UTC) - job.started_at).total_seconds())
        self._began_at = time.monotonic() - before_seconds
        if threading.current_thread() is threading.main_thread():  # Ray calls a worker in another thread
            signal.signal(signal.SIGTERM, self._terminate)

    def check(self, step: int) -> StopReason:
        """The strongest reason that this worker sees. Called after every step, by every worker."""
        reasons = [StopReason.NONE]
        if self._is_terminated:
            reasons.append(StopReason.SIGTERM)
        if step % PREEMPTION_INTERVAL_STEPS == 0 and choose_launcher(self._environment.launch).is_preemption_noticed():
            reasons.append(StopReason.PREEMPTION)
        if self._environment.rank == 0:
            reasons += [_read_request(self._file), self._read_clock()]
        return max(reasons)

    def _read_clock(self) -> StopReason:
        limit = self._job.recipe.train.time_limit_seconds
        elapsed_seconds = time.monotonic() - self._began_at
        return StopReason.TIME_LIMIT if limit and elapsed_seconds >= limit else StopReason.NONE

    def _terminate(self, signum: int, frame: object) -> None:
        self._is_terminated = True


def request_stop(run_folder: Path, reason: StopReason) -> None:
    """Ask the workers to stop, through the file system: it reaches Ray workers on any node."""
    with suppress(IsADirectoryError):  # a person made the request, as a folder
        write_durably(run_folder / STOP_FILE, reason.name.encode())


def clear_stop(run_folder: Path) -> None:
    """The request has been carried out: remove it, where that is possible. `stopped` says where it is not."""
    path = run_folder / STOP_FILE
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()


def forget_signals(run_folder: Path) -> None:
    """Drop a request that a signal to an earlier command left; one that a person made is kept, and announced."""
    path = run_folder / STOP_FILE
    reason = _read_request(path)
    if reason > StopReason.STOP_FILE:
        path.unlink(missing_ok=True)
    elif reason:
        logger.warning("%s is there: the run will stop after its first step, with a checkpoint", path)


def stopped(reason: StopReason, step: int, run_folder: Path) -> MillraceError:
    """What a stopped run ends with: exit 75, or 130 for Ctrl-C."""
    kind = Interrupted if reason is StopReason.INTERRUPT else TryAgain
    path = run_folder / STOP_FILE
    text = f"Stopped by {reason} after step {step}; its checkpoint is committed. The same command continues."
    if os.path.lexists(path):
        text += f" But {path} is still there and would stop it after its first step: remove it."
    return kind(text)


def _read_request(path: Path) -> StopReason:
    """Whatever lies at `path` is a request to stop: a file with any content, a folder, a link to nowhere.

    What `request_stop` wrote says whose signal it was.
    """
    if not os.path.lexists(path):
        return StopReason.NONE
    written = _read_begin(path)
    signals = [reason for reason in StopReason if reason > StopReason.STOP_FILE]
    return next((reason for reason in signals if reason.name.encode() == written), StopReason.STOP_FILE)


def _read_begin(path: Path) -> bytes:
    """The first bytes of a regular file; nothing of what cannot be read, or would block as a pipe does."""
    try:
        with open_regular_file(path, within=path.parent) as file:
            return file.read(64).strip()
    except OSError:
        return b""
