"""Ends a worker whose step hangs, and writes its heartbeat.

`faulthandler` writes the stacks of all threads to the rank's log and ends the process when a step takes longer than its
limit, also where native code hangs. The launcher then ends the other workers, and the command names the ranks that were
silent (`heartbeats.py`) and starts all again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from services.common.process.background_thread import running_in_background
from services.trainer.health.heartbeats import (
    BETWEEN_PHASES,
    HEARTBEAT_SECONDS,
    STEP,
    heartbeat_seconds,
    write_heartbeat,
)
from services.trainer.job import Job, rank_log

if TYPE_CHECKING:
    from services.common.program.process_group import ProcessGroup

logger = logging.getLogger(__name__)

STEPS_IN_MEDIAN = 50
EVALUATION = "evaluation"
HEALTH = "health measurement"


class Watchdog:
    """Context that ends this process when a step takes longer than the recipe allows.

    The limit applies from the third step of the process on: the first compiles, and the second is the first that is
    timed. Evaluations and checkpoints have no limit besides the timeout of collectives.
    """

    def __init__(self, job: Job, group: ProcessGroup) -> None:
        self._job, self._group, self._train = job, group, job.recipe.train
        self._activity = ("start", 0, time.monotonic())  # the phase, optimizer steps done, and the phase's start
        self._step_seconds: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)
        self._limit_seconds: float | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._log = self._opened.enter_context(rank_log(self._job.run_folder, self._group.rank).open("ab"))
        self._opened.callback(faulthandler.cancel_dump_traceback_later)
        self._opened.enter_context(running_in_background(self._beat, "heartbeat", HEARTBEAT_SECONDS))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @contextmanager
    def step(self, step: int, is_first: bool) -> Iterator[None]:
        """Watch the optimizer step that the block takes after `step` steps. A program's first has no limit."""
        started = time.monotonic()
        if self._limit_seconds and not is_first:
            faulthandler.dump_traceback_later(self._limit_seconds, exit=True, file=self._log)
        try:
            with self.phase("first step" if is_first else STEP, step):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        if not is_first:
            self._step_seconds.append(time.monotonic() - started)
            floor, factor = self._train.watchdog_min_seconds, self._train.watchdog_factor
            self._limit_seconds = limit_seconds(list(self._step_seconds), factor, floor)

    @contextmanager
    def phase(self, phase: str, step: int) -> Iterator[None]:
        """Name the phase of the block in heartbeats."""
        self._activity = (phase, step, time.monotonic())
        yield
        self._activity = (BETWEEN_PHASES, step, time.monotonic())

    def _beat(self, is_over: threading.Event) -> None:
        began_at = time.monotonic()
        while True:
            try:
                write_heartbeat(self._job.run_folder, self._heartbeat(time.monotonic() - began_at))
            except OSError as error:
                logger.debug("no heartbeat: %s", error)
            if is_over.wait(heartbeat_seconds(self._limit_seconds)):
                return

    def _heartbeat(self, alive_seconds: float) -> dict[str, Any]:
        phase, step, began_at = self._activity
        return {
            "rank": self._group.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": self._job.attempt,
            "start": self._job.start_number,
            "alive_seconds": round(alive_seconds, 1),
            "phase": phase,
            "step": step,
            "phase_seconds": round(time.monotonic() - began_at, 1),
            "limit_seconds": self._limit_seconds and round(self._limit_seconds, 1),
        }


def limit_seconds(step_seconds: list[float], factor: float, min_seconds: float) -> float | None:
    """Return the seconds that the next step may take, from the seconds of steps before it; None for no limit."""
    return max(min_seconds, factor * statistics.median(step_seconds)) if factor and step_seconds else None
