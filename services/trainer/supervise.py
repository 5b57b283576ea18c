"""The command's side of a run: start the workers, start them again when one is lost, pass on signals, show progress."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn

from services.common.artifacts.lease import HeldLease
from services.common.errors import NoRoomForWorkers, WorkersLost
from services.common.hardware.faults import naming_hardware_faults
from services.common.launch.launcher import WorkerEnvironment, choose_launcher
from services.common.process.private_folder import private_base
from services.common.process.stop_signals import Stopped, end_soon, name_signal, on_stop_signal
from services.common.process.telemetry import Progress, show_progress
from services.trainer.checkpoints.lookup import newest_step
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import NewWarnings, explain_loss, record_event
from services.trainer.metrics.records import read_last_step
from services.trainer.node_staging import using_node
from services.trainer.stop import StopReason, forget_signals, request_stop
from services.trainer.worker_start import describe_workers

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0


def supervise(job: Job, lease: HeldLease) -> None:
    """Run the workers until the run is complete. Each attempt has a token of its own: what is left of a lost one, a
    process that was cut off or frozen, commits nothing any more.

    Raises what they raised; `WorkersLost` when they were lost more than `train.max_restarts` times since the newest
    checkpoint.
    """
    max_restarts = job.recipe.train.max_restarts
    forget_signals(job.run_folder)
    launcher = choose_launcher(job.launch)
    spec = describe_workers(job.recipe, job.run_folder)
    logger.info("starting %d workers (%s); logs are in %s", spec.num_workers, job.launch, job.run_folder / "logs")
    restarts, committed = 0, newest_step(job.checkpoint_collection) or 0
    request = _StopRequest(job)
    with on_stop_signal(request.make, again=_end_at_once), _progress_of(job) as progress:
        while True:
            request.begin_attempt()
            try:
                launcher.run_workers(
                    train_on_node,
                    replace(job, lease=lease.renew()),
                    spec,
                )
                return
            except NoRoomForWorkers:
                raise
            except WorkersLost as error:
                loss = explain_loss(job, error)
                if request.signum is not None:
                    raise Stopped(
                        request.signum,
                        f"Stopped by {name_signal(request.signum)}, and the workers were lost meanwhile ({error}). The "
                        f"same command continues from the newest committed checkpoint.",
                    ) from error
                before, committed = committed, newest_step(job.checkpoint_collection) or 0
                restarts = 0 if committed > before else restarts  # a run of weeks may lose workers many times
                if restarts == max_restarts:
                    raise WorkersLost(
                        f"workers were lost {restarts + 1} times, train.max_restarts is {max_restarts}; the last time: "
                        f"{loss}\nThe same command continues from the newest checkpoint."
                    ) from error
                restarts += 1
                progress.start_again()
                logger.warning("lost the workers (%s); starting them again", loss.splitlines()[0])
                record_event(job, "restart", restarts=restarts, from_step=committed, cause=loss.splitlines()[0])
                job = replace(job, workers_started_at=datetime.now(UTC), start_number=job.start_number + 1)


def train_on_node(job: Job, environment: WorkerEnvironment) -> None:
    """What a worker runs: `train`, leaving nothing on a node that no other process of this command uses."""
    # Inductor keeps files there whose paths it splits at spaces.
    os.environ["TMPDIR"] = tempfile.tempdir = str(private_base().parent)
    with using_node(job), naming_hardware_faults():
        train(job, environment)


class _StopRequest:
    """SIGTERM, SIGHUP and Ctrl-C ask the workers for a checkpoint at the next step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._recorded: dict[str, Any] | None = None
        self.signum: int | None = None
        """Of the signal that made the request."""

    def begin_attempt(self) -> None:
        self._recorded = self._last_record()

    def make(self, signum: int) -> None:
        """Raises `Stopped` where there is nothing to wait for: no step was recorded since the workers were started."""
        self.signum = signum
        if self._last_record() == self._recorded:
            raise Stopped(
                signum,
                f"Stopped by {name_signal(signum)} before the first step. The same command continues from the newest "
                f"committed checkpoint.",
            )
        logger.warning("%s: stopping at the next step with a checkpoint; once more to end at once", name_signal(signum))
        reason = StopReason.INTERRUPT if signum == signal.SIGINT else StopReason.SIGTERM
        try:
            request_stop(self._job.run_folder, reason)
        except OSError:  # a full disk takes neither the request nor a checkpoint
            _end_at_once(signum)

    def _last_record(self) -> dict[str, Any] | None:
        return read_last_step(self._job.run_folder)


def _end_at_once(signum: int) -> NoReturn:
    end_soon(signum, "Ended at once. The same command continues from the newest committed checkpoint.")


@contextmanager
def _progress_of(job: Job) -> Iterator[Progress]:
    """Follow the run through its metrics file, which is the same for every launcher."""
    stop = threading.Event()
    max_steps = job.recipe.train.max_steps
    with show_progress("training", max_steps, "steps") as progress:
        before = read_last_step(job.run_folder)  # told apart so: workers' clocks are not ours
        follower = threading.Thread(target=_follow, args=(job, progress, stop, before), name="progress", daemon=True)
        follower.start()
        try:
            yield progress
        finally:
            stop.set()
            follower.join()


def _follow(job: Job, progress: Progress, stop: threading.Event, before: dict[str, Any] | None) -> None:
    is_over, warnings = False, NewWarnings(job)
    while not is_over:
        is_over = stop.wait(PROGRESS_SECONDS)
        for told in warnings.read():
            logger.warning(told)
        last = read_last_step(job.run_folder)
        if last and last != before:
            progress.advance_to(last["step"], f"loss {last['loss']:.2f}, {last['tokens_per_second']:,.0f} tokens/s")
        else:
            progress.wait()
