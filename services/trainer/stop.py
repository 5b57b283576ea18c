"""Decides for all workers together whether a run stops early.

After every step rank 0 checks the run's stop file and the time limit. While the workers take the next step they agree
on the reason, so all of them stop after that next step, with one checkpoint.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from contextlib import suppress
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
        self._job = job
        self._environment = environment
        self._file = job.run_folder / STOP_FILE
        # The command may have started on another machine, and nobody can set a monotonic clock.
        before_seconds = max(0.0, (datetime.now(UTC) - job.started_at).total_seconds())
        self._began_at = time.monotonic() - before_seconds

    def check(self) -> StopReason:
        """Return the strongest reason that there is; NONE on all ranks but 0.

        All workers call this after every step and every round of an evaluation.
        """
        if self._environment.rank != 0:
            return StopReason.NONE
        return max(_read_request(self._file), self._read_clock())

    def _read_clock(self) -> StopReason:
        limit = self._job.recipe.train.time_limit_seconds
        elapsed_seconds = time.monotonic() - self._began_at
        return StopReason.TIME_LIMIT if limit and elapsed_seconds >= limit else StopReason.NONE


def request_stop(run_folder: Path, reason: StopReason) -> None:
    """Ask the workers to stop, by a file in the run's folder that workers on all nodes see.

    A stronger request that is there already stays. Raises `OSError`.
    """
    path = run_folder / STOP_FILE
    if _read_request(path) < reason:
        with suppress(IsADirectoryError):  # a person has made a folder as a request
            write_durably(path, reason.name.encode())


def clear_stop(run_folder: Path) -> None:
    """Remove the request after the run has stopped. Where that is impossible, `stopped` says so."""
    path = run_folder / STOP_FILE
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()


def forget_signals(run_folder: Path) -> None:
    """Remove the request of a signal or a preemption to an earlier command. A person's stays, with a warning."""
    path = run_folder / STOP_FILE
    reason = _read_request(path)
    if reason > StopReason.STOP_FILE:
        path.unlink(missing_ok=True)
    elif reason:
        logger.warning("%s exists: the run will stop after its first step, with a checkpoint", path)


def requested_stop(run_folder: Path) -> StopReason:
    """Return the stop that a signal or a preemption has requested; NONE where there is none."""
    reason = _read_request(run_folder / STOP_FILE)
    return reason if reason > StopReason.STOP_FILE else StopReason.NONE


def stopped_by_loss(reason: StopReason, loss: str) -> MillraceError:
    """Make the error of a run that should stop, and whose workers were lost before they stopped."""
    kind = Interrupted if reason is StopReason.INTERRUPT else TryAgain
    return kind(
        f"Stopped by {reason}, but the workers were lost before they stopped ({loss}). The same command continues from "
        f"the newest committed checkpoint."
    )


def stopped(reason: StopReason, step: int | None, run_folder: Path) -> MillraceError:
    """Make the error of a run that stopped early after a step, or None before its first one.

    Its exit code is 75, or 130 for Ctrl-C.
    """
    kind = Interrupted if reason is StopReason.INTERRUPT else TryAgain
    path = run_folder / STOP_FILE
    where = "before the first step" if step is None else f"after step {step}; its checkpoint is committed"
    text = f"Stopped by {reason} {where}. The same command continues."
    if os.path.lexists(path):
        text += f" But {path} is still there and would stop it after its first step: remove it first."
    return kind(text)


def _read_request(path: Path) -> StopReason:
    """Read the request at `path`, which may be a file with any content, a folder, or a dangling link.

    A file that `request_stop` wrote names the reason.
    """
    if not os.path.lexists(path):
        return StopReason.NONE
    written = _read_start(path)
    written_by_program = [reason for reason in StopReason if reason > StopReason.STOP_FILE]
    return next((reason for reason in written_by_program if reason.name.encode() == written), StopReason.STOP_FILE)


def _read_start(path: Path) -> bytes:
    """Return the first bytes of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).strip()
    except OSError:
        return b""
