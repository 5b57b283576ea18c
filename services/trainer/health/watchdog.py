"""Writes a worker's heartbeat, and ends the worker when a step hangs.

A thread of every worker writes a heartbeat to the node's board each second: the worker's phase and step, and the
seconds since the phase began. The node's agent writes the heartbeats of its workers every ten seconds to the file
`heartbeats/node-00003.jsonl` in the run's folder. A frozen worker (SIGSTOP, a node without memory, a dead network file
system) stops writing. Its peers hang in the next collective. Before their step is late, their watchdogs begin to look
for ranks whose heartbeat stands still. When it is late, they write all stacks to `logs/rank-00003.stacks`, name those
ranks, and end their own process. Then the launcher ends the whole group, including the frozen worker, and the command
starts it again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from services.common.errors import StorageError, WorkersLost
from services.common.input.files import open_for_append
from services.common.launch.launcher import WorkerEnvironment
from services.common.launch.node_board import NodeBoard
from services.common.program import process_group
from services.common.program.process_group import ProcessGroup
from services.trainer.health.silence import (
    HEARTBEAT_SECONDS,
    LOOK_AHEAD_SECONDS,
    SILENT_SECONDS,
    SilenceSearch,
    SilentRanks,
)
from services.trainer.job import Job
from services.trainer.metrics.events import find_watchdog_event, record_event

logger = logging.getLogger(__name__)

END_SECONDS = 60.0
"""Seconds within which a watchdog ends its process after a step is late. The timeout of collectives includes them."""
STEPS_IN_MEDIAN = 50
STDERR = 2
FIRST_STEP = "first step"
EVALUATION = "evaluation"
HEALTH = "health measurement"
BETWEEN_PHASES = "between phases"


@dataclass(frozen=True, eq=False)
class _Activity:
    """The main thread's current phase. Two activities are equal only if they are the same object."""

    phase: str
    step: int
    """Optimizer steps done."""
    is_limited: bool
    """Whether the watchdog ends the process when the phase takes longer than the limit of a step."""


class Watchdog:
    """Context that ends this process with exit code 75 when a step takes longer than the recipe allows.

    The limit applies from the third step of the process on: the first step compiles, and the second step is the first
    one that is timed. Evaluations and checkpoints have no limit besides the timeout of collectives.
    """

    def __init__(self, job: Job, environment: WorkerEnvironment, group: ProcessGroup) -> None:
        self._job, self._environment, self._group, self._train = job, environment, group, job.recipe.train
        self._board: NodeBoard | None = None
        self._search: SilenceSearch | None = None
        """The search for silent workers that began when the step was about to be late."""
        self._activity = _Activity("start", 0, is_limited=False)
        self._step_seconds: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)
        self._limit_seconds: float | None = None
        self._timeout = self._longest_timeout = process_group.COLLECTIVE_TIMEOUT
        self._beats = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._environment.node_folder:
            self._board = NodeBoard.open(self._environment.node_folder)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._activity = _Activity("end", self._activity.step, is_limited=False)  # an end of the process is called off
        self._has_ended.set()
        self._thread.join(SILENT_SECONDS)  # it may be writing stacks to a file system that hangs
        if self._board and not self._thread.is_alive():
            self._board.close()
        self._limit_collectives(self._longest_timeout)

    @contextmanager
    def step(self, step: int, is_first: bool) -> Iterator[None]:
        """Watch the optimizer step that the block takes after `step` steps.

        The first step of a program compiles, so it has no limit, and the limit of later steps does not count it.
        """
        started = time.monotonic()
        with self._doing(_Activity(FIRST_STEP if is_first else "step", step, is_limited=not is_first)):
            yield
        if not is_first:
            self._step_seconds.append(time.monotonic() - started)
            self._limit_seconds = limit_seconds(list(self._step_seconds), self._train.watchdog_factor, self._floor)

    @contextmanager
    def phase(self, phase: str, step: int) -> Iterator[None]:
        """Name the phase of the block, which has no limit, in heartbeats."""
        with self._doing(_Activity(phase, step, is_limited=False)):
            yield

    @property
    def _floor(self) -> float:
        return self._train.watchdog_min_seconds

    @contextmanager
    def _doing(self, activity: _Activity) -> Iterator[None]:
        timeout = self._longest_timeout
        # A first step, evaluation or measurement compiles, on one worker for longer than on another.
        if self._limit_seconds and activity.phase not in (FIRST_STEP, EVALUATION, HEALTH):
            timeout = timedelta(seconds=2 * self._limit_seconds + END_SECONDS)
        self._limit_collectives(timeout)
        self._activity = activity
        yield
        self._activity = _Activity(BETWEEN_PHASES, activity.step, is_limited=False)

    def _limit_collectives(self, timeout: timedelta) -> None:
        # The median changes a little with each step, and setting a timeout costs more than that is worth.
        if abs(timeout - self._timeout) > 0.2 * self._timeout:
            self._group.limit_collectives(timeout)
            self._timeout = timeout

    def _watch(self) -> None:
        """Count only seconds in which this thread runs: a process that was frozen itself is not late."""
        watched, stalled_seconds, before = self._activity, 0.0, time.monotonic()
        self._beat(watched, stalled_seconds)
        while not self._has_ended.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            stalled_seconds += min(now - before, 2 * HEARTBEAT_SECONDS)
            before = now
            if self._activity is not watched:
                watched, stalled_seconds, self._search = self._activity, 0.0, None
            self._beat(watched, stalled_seconds)
            if not watched.is_limited or not self._limit_seconds:
                continue
            if stalled_seconds > self._limit_seconds - LOOK_AHEAD_SECONDS:
                self._look_for_silence()
            if stalled_seconds > self._limit_seconds:
                self._end_process(watched, stalled_seconds)

    def _look_for_silence(self) -> None:
        if self._search:
            self._search.go_on()
        elif self._board:
            self._search = SilenceSearch(self._job, self._environment, self._board)

    def _beat(self, activity: _Activity, seconds: float) -> None:
        if self._board is None:
            return
        self._beats += 1
        heartbeat = {
            "rank": self._group.rank,
            "pid": os.getpid(),
            "attempt": self._job.attempt,
            "start": self._job.start_number,
            "beats": self._beats,
            "phase": activity.phase,
            "step": activity.step,
            "phase_seconds": round(seconds, 1),
            "limit_seconds": self._limit_seconds and round(self._limit_seconds, 1),
        }
        self._board.write_heartbeat(self._environment.local_rank, json.dumps(heartbeat).encode())

    def _end_process(self, activity: _Activity, seconds: float) -> None:
        """Write all stacks, record an event and end the process: the main thread may hang in C code for ever."""
        # A thread in C ends the process even if the following lines hang, as on a file system whose server is gone.
        faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=STDERR)
        rank = self._group.rank
        stacks = stacks_file(self._job.run_folder, rank)
        step, limit = activity.step + 1, self._limit_seconds
        late = f"rank {rank}: step {step} has taken {seconds:.0f} s, the limit is {limit:.0f} s"
        try:
            with open_for_append(stacks) as file:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {late}\n".encode())
                file.flush()
                faulthandler.dump_traceback(file.fileno(), all_threads=True)
        except (OSError, StorageError) as error:
            logger.warning("%s: the stacks could not be written: %s", stacks, error)
        silent = self._find_silent_ranks()
        if self._activity is not activity:
            faulthandler.cancel_dump_traceback_later()
            logger.warning("%s, but it ended in the meantime", late)
            return
        rule = f"the larger of train.watchdog_min_seconds and {self._train.watchdog_factor:g} median steps"
        message = f"{late} ({rule}). {silent} Stacks are in {stacks}."
        logger.error(message)
        event = {"step": step, "rank": rank, "silent_ranks": silent.ranks, "seconds": round(seconds, 1)}
        if not silent.speaks:
            time.sleep(SILENT_SECONDS)  # the first process to end ends the others, which still write their stacks
            if self._activity is not activity:
                faulthandler.cancel_dump_traceback_later()
                return
        if not find_watchdog_event(self._job):  # one event per start of the workers
            record_event(self._job, "watchdog", **event, stacks=str(stacks), message=message)
        os._exit(WorkersLost.exit_code)

    def _find_silent_ranks(self) -> SilentRanks:
        return self._search.find(self._wait) if self._search else SilentRanks([])

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, HEARTBEAT_SECONDS))
            self._beat(self._activity, 0.0)


def limit_seconds(step_seconds: list[float], factor: float, min_seconds: float) -> float | None:
    """Return the seconds that the next step may take, from the seconds of steps before it; None for no limit."""
    return max(min_seconds, factor * statistics.median(step_seconds)) if factor and step_seconds else None


def stacks_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "logs" / f"rank-{rank:05d}.stacks"
