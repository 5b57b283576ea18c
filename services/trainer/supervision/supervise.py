"""Supervises the workers for the command: starts them, passes on signals, shows progress and posts notices."""

from __future__ import annotations

import logging
import pickle  # nosec B403 # only this process's own objects are pickled
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from services.common.artifacts.upstream import stage_command
from services.common.hardware.faults import naming_hardware_faults
from services.common.launch.launcher import WorkerEnvironment, WorkerGroup, choose_launcher
from services.common.notices import notifying
from services.common.process.background_thread import running_in_background
from services.common.process.progress import show_progress
from services.common.process.shutdown import StopReason, end_soon, name_signal, on_stop_signal, raise_stopped
from services.common.process.telemetry import JsonLinesTail
from services.common.recipe.schema import NoticeCondition
from services.trainer.checkpoints.steps import newest_step
from services.trainer.evaluation.records import EVALUATIONS_FILE, describe_record
from services.trainer.health.heartbeats import forget_heartbeats, read_phase
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import EventTail, is_restarting, warnings_of
from services.trainer.metrics.records import read_last_step, read_report
from services.trainer.supervision.restarts import RestartPolicy
from services.trainer.supervision.stop import forget_signals, request_stop
from services.trainer.workers.node_staging import node_folder
from services.trainer.workers.start import describe_workers

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0
CONTINUE = "The same command continues from the newest committed checkpoint."

Observer = Callable[[list[dict[str, Any]]], None]
"""Gets the events of the run that were recorded since the last call."""
NOTICED_EVENTS: dict[str, NoticeCondition] = {
    "restart": "workers_lost",
    "rollbacks_exhausted": "diverged",
    "loss_deviates_at_end": "diverged",
    "diverged": "diverged",
}
"""Conditions by the kind of the run's event."""

_NOT_TOLD = ("event", "time", "attempt", "start")


def supervise(job: Job, observe: Observer = lambda events: None) -> None:
    """Run the workers until the run is complete, and pass new events of the run to `observe`, which must not wait.

    Raises the workers' error, and `WorkersLost` when the restarts are spent.
    """
    forget_signals(job.run_folder)
    forget_heartbeats(job.run_folder)
    spec = describe_workers(job.recipe, job.run_folder, node_folder(job).name)
    workers, logs = f"{spec.num_workers} workers ({job.launch})", job.run_folder / "logs"
    step = newest_step(job.checkpoint_collection) or job.recipe.train.first_step
    logger.info("starting %s%s; logs are in %s", workers, f" to continue after step {step:,}" if step else "", logs)
    group = WorkerGroup(
        pickle.dumps((train_on_node, job)),
        spec,
        RestartPolicy(job),
        name=job.run,
        storage_path=job.checkpoint_collection.parent,
        max_node_losses=job.recipe.train.max_restarts,
        read_report=partial(read_report, job),
        stop=partial(request_stop, job.run_folder, StopReason.PREEMPTION),
    )
    request = _StopRequest(job)
    with on_stop_signal(request.make, again=_end_at_once), _progress_of(job, step, observe):
        choose_launcher(job.launch).run_workers(group)
    if request.signum is not None:  # it came after the last step, at which the workers no longer look
        forget_signals(job.run_folder)


def train_on_node(job: Job, environment: WorkerEnvironment) -> None:
    """Train as one worker."""
    if environment.start_number:
        started_at = datetime.fromtimestamp(environment.started_at, UTC)
        job = replace(job, start_number=environment.start_number, workers_started_at=started_at)
    with naming_hardware_faults():
        train(job, environment)


@contextmanager
def notifying_run(job: Job, recipe_path: Path) -> Iterator[Observer]:
    """Yield the observer of the run's new events, and tell that the run is done or has failed at the block's end."""
    subject = f"trainer {job.run}"
    with notifying(job.recipe.notify, subject, stage_command("trainer", recipe_path, job.root)) as post:

        def observe(events: list[dict[str, Any]]) -> None:
            for event in events:
                if condition := NOTICED_EVENTS.get(event["event"]):
                    facts = (f"{name} {value}" for name, value in event.items() if name not in _NOT_TOLD)
                    post(condition, ", ".join(facts))

        yield observe
        post("done", f"trained to step {job.recipe.train.max_steps:,}")


class _StopRequest:
    """Passes SIGTERM, SIGHUP and Ctrl-C on to the workers, which then stop after the next step with a checkpoint."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._recorded = read_last_step(job.run_folder)
        self.signum: int | None = None
        """Number of the signal that made the request."""

    def make(self, signum: int) -> None:
        """Ask the workers to stop. Raises `Stopped` at once if this start of the workers has not recorded a step."""
        self.signum = signum
        if is_restarting(self._job) or read_last_step(self._job.run_folder) == self._recorded:
            raise_stopped(signum, f"Stopped by {name_signal(signum)} before the first step. {CONTINUE}")
        logger.warning(
            "%s: stopping after the next step with a checkpoint; send it again to end at once", name_signal(signum)
        )
        reason = StopReason.INTERRUPT if signum == signal.SIGINT else StopReason.SIGTERM
        try:
            request_stop(self._job.run_folder, reason)
        except OSError:  # a full disk has no room for the request, nor for a checkpoint
            _end_at_once(signum)


def _end_at_once(signum: int) -> NoReturn:
    end_soon(signum, f"Ended at once. {CONTINUE}")


@contextmanager
def _progress_of(job: Job, step: int, observe: Observer) -> Iterator[None]:
    """Show the run's progress from its records, which every launcher has, and pass on its events."""

    def follow(is_over: threading.Event) -> None:
        is_last, tail, seen = False, EventTail(job), before
        while not is_last:
            is_last = is_over.wait(PROGRESS_SECONDS)
            for evaluated in evaluations.read():
                logger.info(describe_record(evaluated, job.started_at.timestamp()))
            events = tail.read()
            for warning in warnings_of(events):
                logger.warning(warning)
            for event in events:
                if event["event"] == "restart":
                    logger.warning("lost the workers (%s); starting them again", event.get("cause"))
                    progress.start_again()
            observe(events)
            last = read_last_step(job.run_folder)
            if last and last != seen:
                seen = last
                progress.advance_to(last["step"], f"loss {last['loss']:.2f}, {last['tokens_per_second']:,.0f} tokens/s")
            else:
                progress.wait(read_phase(job.run_folder))

    with show_progress("training", job.recipe.train.max_steps, "steps") as progress:
        progress.start_again(step)
        before = read_last_step(job.run_folder)  # workers' clocks may differ from this one
        evaluations = JsonLinesTail(job.run_folder / EVALUATIONS_FILE, from_end=True)
        with running_in_background(follow, "progress"):
            yield
