"""A worker's heartbeat, and the watchdog that ends a worker which hangs.

A thread of every worker writes `heartbeats/rank-00003.json` in the run's folder: what the worker does, and since when.
A frozen worker (SIGSTOP, a node without memory, a dead network file system) writes none any more. Its peers hang in the
next collective; their watchdogs write all stacks to `logs/rank-00003.stacks`, find out whose heartbeat stands still,
and end their process: then the launcher ends the group, the frozen worker too, and the command starts it again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from services.common.errors import StorageError, WorkersLost
from services.common.input.files import open_for_append, read_file
from services.common.process.telemetry import parse_json_line
from services.common.program import process_group
from services.common.program.process_group import ProcessGroup
from services.trainer.job import Job
from services.trainer.metrics.events import find_watchdog_event, record_event

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
"""Without a heartbeat: a worker is silent."""
END_SECONDS = 60.0
"""In which a watchdog ends its process, whatever it says before; collectives give it that time."""
STEPS_IN_MEDIAN = 50
STDERR = 2
FIRST_STEP = "first step"
_HEARTBEAT_BYTES = 512
_MAX_HEARTBEAT_BYTES = 2**16


@dataclass(frozen=True, eq=False)
class _Activity:
    """What the worker's main thread does; another one is another object."""

    phase: str
    step: int
    """Optimizer steps done."""
    is_limited: bool


class Watchdog:
    """Ends this process with 75 when a step takes longer than the recipe allows; to be used as a context.

    Steps are limited from the third one of the process on: the first one compiles, and the second one is timed.
    Evaluation and checkpoints are not; there the collectives' timeout has to do.
    """

    def __init__(self, job: Job, group: ProcessGroup) -> None:
        self._job, self._group, self._train = job, group, job.recipe.train
        self._activity = _Activity("start", 0, is_limited=False)
        self._step_seconds: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)
        self._limit_seconds: float | None = None
        self._timeout = self._longest_timeout = process_group.COLLECTIVE_TIMEOUT
        self._beats = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        heartbeat_file(self._job.run_folder, 0).parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.begin("end", self._activity.step)  # one that is just about to end the process lets it be
        self._has_ended.set()
        self._thread.join(SILENT_SECONDS)  # where it writes a heartbeat to a file system that does not answer
        self._limit_collectives(self._longest_timeout)

    def begin_step(self, step: int, is_limited: bool) -> None:
        """`step` optimizer steps are done, and another one begins; one that compiles is not limited."""
        self._begin(_Activity("step" if is_limited else FIRST_STEP, step, is_limited))

    def end_step(self, seconds: float, is_first: bool) -> None:
        """The step took so long; the first one of a process does not count."""
        if not is_first:
            self._step_seconds.append(seconds)
            self._limit_seconds = limit_seconds(list(self._step_seconds), self._train.watchdog_factor, self._floor)

    def begin(self, phase: str, step: int) -> None:
        """What may take long begins."""
        self._begin(_Activity(phase, step, is_limited=False))

    @property
    def _floor(self) -> float:
        return self._train.watchdog_min_seconds

    def _begin(self, activity: _Activity) -> None:
        self._activity = activity
        timeout = self._longest_timeout
        # A first step and the first evaluation compile, on one worker for longer than on another.
        if self._limit_seconds and activity.phase not in (FIRST_STEP, "evaluation"):
            timeout = timedelta(seconds=2 * self._limit_seconds + END_SECONDS)
        self._limit_collectives(timeout)

    def _limit_collectives(self, timeout: timedelta) -> None:
        # Not for each breath of the median.
        if abs(timeout - self._timeout) > 0.2 * self._timeout:
            self._group.limit_collectives(timeout)
            self._timeout = timeout

    def _watch(self) -> None:
        """Count the time that passes while this thread runs: a process that was frozen itself is not late."""
        watched, stalled_seconds, before = self._activity, 0.0, time.monotonic()
        self._beat(watched, stalled_seconds)
        while not self._has_ended.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            stalled_seconds += min(now - before, 2 * HEARTBEAT_SECONDS)
            before = now
            if self._activity is not watched:
                watched, stalled_seconds = self._activity, 0.0
            self._beat(watched, stalled_seconds)
            if watched.is_limited and self._limit_seconds and stalled_seconds > self._limit_seconds:
                self._end_process(watched, stalled_seconds)

    def _beat(self, activity: _Activity, seconds: float) -> None:
        self._beats += 1
        heartbeat = {
            "rank": self._group.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": self._job.attempt,
            "start": self._job.start_number,
            "beats": self._beats,
            "time": time.time(),
            "phase": activity.phase,
            "step": activity.step,
            "phase_seconds": round(seconds, 1),
            "limit_seconds": self._limit_seconds and round(self._limit_seconds, 1),
        }
        try:
            # In place, and always as long: no reader finds an empty file, and closing it sends it to a server.
            path = heartbeat_file(self._job.run_folder, self._group.rank)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)  # no pipe is waited for
            try:
                os.write(descriptor, json.dumps(heartbeat).encode().ljust(_HEARTBEAT_BYTES) + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.debug("no heartbeat: %s", error)

    def _end_process(self, activity: _Activity, seconds: float) -> None:
        """The main thread may be in C for ever, so nothing but the process's end gets it out."""
        # By a thread of C's, should what comes now hang too, as on a file system whose server is gone.
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
            logger.warning("%s, and has ended meanwhile", late)
            return
        rule = f"the larger of train.watchdog_min_seconds and {self._train.watchdog_factor:g} median steps"
        message = f"{late} ({rule}). {silent} Stacks are in {stacks}."
        logger.error(message)
        event = {"step": step, "rank": rank, "silent_ranks": silent.ranks, "seconds": round(seconds, 1)}
        speakers = [each for each in range(self._group.world_size) if each not in silent.ranks]
        if rank != min(speakers, default=rank):
            time.sleep(SILENT_SECONDS)  # the first one to end ends the others, which have stacks to write
            if self._activity is not activity:
                faulthandler.cancel_dump_traceback_later()
                return
        if not find_watchdog_event(self._job):  # by whoever is late first: the lowest rank may be on time
            record_event(self._job, "watchdog", **event, stacks=str(stacks), message=message)
        os._exit(WorkersLost.exit_code)

    def _find_silent_ranks(self) -> SilentRanks:
        """Whose heartbeat stands still, by its number: the clocks of nodes differ."""
        before = [self._read_heartbeat(rank) for rank in range(self._group.world_size)]
        deadline = time.monotonic() + SILENT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, HEARTBEAT_SECONDS))
            self._beat(self._activity, SILENT_SECONDS - left)
        after = [self._read_heartbeat(rank) for rank in range(self._group.world_size)]
        if before[self._group.rank] == after[self._group.rank]:
            return SilentRanks([], after, are_readable=False)
        silent = [rank for rank, beats in enumerate(before) if beats == after[rank] and rank != self._group.rank]
        return SilentRanks(silent, after)

    def _read_heartbeat(self, rank: int) -> dict[str, Any]:
        """Of this start of the workers; empty where there is none."""
        found = read_heartbeat(self._job.run_folder, rank)
        is_ours = (found.get("attempt"), found.get("start")) == (self._job.attempt, self._job.start_number)
        return found if is_ours else {}


class SilentRanks:
    """Workers without a heartbeat, and what they were last seen at."""

    def __init__(self, ranks: list[int], heartbeats: list[dict[str, Any]], are_readable: bool = True) -> None:
        self.ranks = ranks
        self._heartbeats, self._are_readable = heartbeats, are_readable

    def __str__(self) -> str:
        if not self._are_readable:
            return "Heartbeats cannot be written to the run's folder, so nobody knows which worker is silent."
        if not self.ranks:
            return "All workers have a heartbeat."
        told = []
        for rank in self.ranks:
            last = self._heartbeats[rank]
            seen = f" ({last['host']}, pid {last['pid']}; last seen in {last['phase']} after step {last['step']})"
            told.append(f"rank {rank}{seen if last else ''}")
        return f"No heartbeat comes from {'; '.join(told)}."


def limit_seconds(step_seconds: list[float], factor: float, min_seconds: float) -> float | None:
    """How long a step may take after these; None for no limit."""
    return max(min_seconds, factor * statistics.median(step_seconds)) if factor and step_seconds else None


def heartbeat_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "heartbeats" / f"rank-{rank:05d}.json"


def stacks_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "logs" / f"rank-{rank:05d}.stacks"


def read_heartbeat(run_folder: Path, rank: int) -> dict[str, Any]:
    """The newest heartbeat of a worker; empty where there is none that can be read."""
    try:
        content = read_file(heartbeat_file(run_folder, rank), max_bytes=_MAX_HEARTBEAT_BYTES)
    except (OSError, ValueError):
        return {}
    return parse_json_line(content) or {}
