"""Supervises the workers for the command: starts and restarts them, passes on signals, and shows progress."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from services.common.artifacts.lease import HeldLease
from services.common.errors import NoRoomForWorkers, WorkersLost
from services.common.launch.launcher import WorkerEnvironment, choose_launcher
from services.common.process.background_thread import running_in_background
from services.common.process.progress import Progress, show_progress
from services.common.process.stop_reason import StopReason
from services.common.process.stop_signals import Stopped, end_soon, name_signal, on_stop_signal
from services.trainer.checkpoints.lookup import newest_step
from services.trainer.health.silence import find_hang, forget_heartbeats
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import EventTail, record_event, warnings_of
from services.trainer.metrics.records import read_last_step
from services.trainer.node_staging import working_on_node
from services.trainer.restarts import RestartBudget
from services.trainer.stop import forget_signals, request_stop
from services.trainer.worker_start import describe_workers

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0

Observer = Callable[[list[dict[str, Any]]], None]
"""Gets the events of the run that were recorded since the last call."""


def supervise(job: Job, lease: HeldLease, observe: Observer = lambda events: None) -> None:
    """Run the workers until the run is complete, and pass new events of the run to `observe`, which must not wait.

    Each start of the workers has its own lease token, so a process of a lost start, disconnected or frozen, cannot
    commit anything later. Raises the workers' error, and `WorkersLost` when workers were lost more than
    `train.max_restarts` times since the newest checkpoint.
    """
    forget_signals(job.run_folder)
    forget_heartbeats(job.run_folder)
    launcher = choose_launcher(job.launch)
    spec = describe_workers(job.recipe, job.run_folder, job.attempt)
    logger.info("starting %d workers (%s); logs are in %s", spec.num_workers, job.launch, job.run_folder / "logs")
    budget = RestartBudget(job.recipe.train.max_restarts, newest_step(job.checkpoint_collection) or 0)
    request = _StopRequest(job)
    with (
        on_stop_signal(request.make, again=_end_at_once),
        _progress_of(job, observe) as progress,
        launcher.open_workers(spec) as workers,
    ):
        while True:
            request.begin_attempt()
            try:
                workers.run(train_on_node, replace(job, lease=lease.renew()))
                if request.signum is not None:  # it came after the last step, at which the workers no longer look
                    forget_signals(job.run_folder)
                return
            except NoRoomForWorkers:
                raise
            except WorkersLost as error:
                loss = str(error)
                if hang := find_hang(job):
                    loss = f"{hang.message}\n{error}"
                    record_event(job, "watchdog", **hang._asdict())
                if request.signum is not None:
                    raise Stopped(
                        request.signum,
                        f"Stopped by {name_signal(request.signum)}, but the workers were lost before they stopped "
                        f"({error}). The same command continues from the newest committed checkpoint.",
                    ) from error
                budget = budget.see_checkpoint(newest_step(job.checkpoint_collection) or 0)
                if budget.is_spent:
                    raise WorkersLost(
                        f"workers were lost {budget.restarts + 1} times, train.max_restarts is {budget.max_restarts}. "
                        f"The last loss: {loss}\nThe same command continues from the newest checkpoint."
                    ) from error
                budget = budget.take_restart()
                progress.start_again()
                cause = loss.splitlines()[0]
                logger.warning("lost the workers (%s); starting them again", cause)
                lost_steps = max(0, request.last_step - budget.committed_step)
                counts = {"restarts": budget.restarts, "from_step": budget.committed_step, "lost_steps": lost_steps}
                record_event(job, "restart", **counts, cause=cause)
                job = replace(job, workers_started_at=datetime.now(UTC), start_number=job.start_number + 1)


def train_on_node(job: Job, environment: WorkerEnvironment) -> None:
    """Train as one worker."""
    with working_on_node(job):
        train(job, environment)


class _StopRequest:
    """Passes SIGTERM, SIGHUP and Ctrl-C on to the workers, which then stop after the next step with a checkpoint."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._recorded: dict[str, Any] | None = None
        self.signum: int | None = None
        """Number of the signal that made the request."""

    def begin_attempt(self) -> None:
        self._recorded = self._last_record()

    def make(self, signum: int) -> None:
        """Ask the workers to stop. Raises `Stopped` at once if this start of the workers has not recorded a step."""
        self.signum = signum
        if self._last_record() == self._recorded:
            raise Stopped(
                signum,
                f"Stopped by {name_signal(signum)} before the first step. The same command continues from the newest "
                f"committed checkpoint.",
            )
        logger.warning(
            "%s: stopping after the next step with a checkpoint; send it again to end at once", name_signal(signum)
        )
        reason = StopReason.INTERRUPT if signum == signal.SIGINT else StopReason.SIGTERM
        try:
            request_stop(self._job.run_folder, reason)
        except OSError:  # a full disk has no room for the request, nor for a checkpoint
            _end_at_once(signum)

    @property
    def last_step(self) -> int:
        """Step of the newest record of the run; 0 where there is none."""
        return int((self._last_record() or {}).get("step", 0))

    def _last_record(self) -> dict[str, Any] | None:
        return read_last_step(self._job.run_folder)


def _end_at_once(signum: int) -> NoReturn:
    end_soon(signum, "Ended at once. The same command continues from the newest committed checkpoint.")


@contextmanager
def _progress_of(job: Job, observe: Observer) -> Iterator[Progress]:
    """Show the run's progress from its metrics file, which every launcher has."""
    max_steps = job.recipe.train.max_steps
    with show_progress("training", max_steps, "steps") as progress:
        before = read_last_step(job.run_folder)  # workers' clocks may differ from this one
        with running_in_background(partial(_follow, job, progress, before, observe), "progress"):
            yield progress


def _follow(
    job: Job, progress: Progress, before: dict[str, Any] | None, observe: Observer, is_over: threading.Event
) -> None:
    is_last, tail = False, EventTail(job)
    while not is_last:
        is_last = is_over.wait(PROGRESS_SECONDS)
        events = tail.read()
        for warning in warnings_of(events):
            logger.warning(warning)
        observe(events)
        last = read_last_step(job.run_folder)
        if last and last != before:
            progress.advance_to(last["step"], f"loss {last['loss']:.2f}, {last['tokens_per_second']:,.0f} tokens/s")
        else:
            progress.wait()
