"""The command's side of a run: start the workers, start them again when one is lost, pass on signals, show progress."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType
from typing import Any, NoReturn

from services.common.artifacts.lease import HeldLease
from services.common.errors import Interrupted, NoRoomForWorkers, TryAgain, WorkersLost
from services.common.launch.launcher import choose_launcher
from services.common.telemetry import Progress, show_progress
from services.trainer.checkpoint import newest_step
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics import read_last_step
from services.trainer.stop import StopReason, forget_signals, request_stop

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0


def supervise(job: Job, lease: HeldLease) -> None:
    """Run the workers until the run is complete. Each attempt has a token of its own: what is left of a lost one, a
    process that was cut off or frozen, commits nothing any more.

    Raises what they raised; `WorkersLost` when they were lost more than `train.max_restarts` times since the newest
    checkpoint.
    """
    parallel, max_restarts = job.recipe.parallel, job.recipe.train.max_restarts
    forget_signals(job.run_folder)
    launcher = choose_launcher(job.launch)
    logger.info(
        "starting %d workers (%s); logs are in %s", parallel.data_parallel_size, job.launch, job.run_folder / "logs"
    )
    restarts, committed = 0, newest_step(job.checkpoint_shelf) or 0
    with _signals_stop_the_run(job), _progress_of(job) as progress:
        while True:
            try:
                launcher.run_workers(
                    train,
                    replace(job, lease=lease.renew()),
                    parallel.data_parallel_size,
                    parallel.threads_per_worker,
                    job.recipe.cluster.trainer_workers_per_node,
                    shared_folder=job.run_folder,
                )
                return
            except NoRoomForWorkers:
                raise
            except WorkersLost as error:
                before, committed = committed, newest_step(job.checkpoint_shelf) or 0
                restarts = 0 if committed > before else restarts  # a run of weeks may lose workers many times
                if restarts == max_restarts:
                    raise WorkersLost(
                        f"workers were lost {restarts + 1} times, train.max_restarts is {max_restarts}; the last time: "
                        f"{error}\nThe same command continues from the newest checkpoint."
                    ) from error
                restarts += 1
                progress.start_again()
                logger.warning("lost the workers (%s); starting them again", str(error).splitlines()[0])
                job = replace(job, workers_started_at=datetime.now(UTC))


@contextmanager
def _signals_stop_the_run(job: Job) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the workers for a checkpoint at the next step; a second one ends the command at once."""
    reasons = {signal.SIGTERM: StopReason.SIGTERM, signal.SIGINT: StopReason.INTERRUPT}
    asked = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            _end_at_once(signum)
        asked = True
        logger.warning(
            "%s: stopping at the next step with a checkpoint; once more to end at once", reasons[signal.Signals(signum)]
        )
        try:
            request_stop(job.run_folder, reasons[signal.Signals(signum)])
        except OSError:  # a full disk takes neither the request nor a checkpoint
            _end_at_once(signum)

    previous = {signum: signal.signal(signum, stop) for signum in reasons}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _end_at_once(signum: int) -> NoReturn:
    kind = Interrupted if signum == signal.SIGINT else TryAgain
    raise kind("Ended at once. The same command continues from the newest committed checkpoint.")


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
    is_over = False
    while not is_over:
        is_over = stop.wait(PROGRESS_SECONDS)
        last = read_last_step(job.run_folder)
        if last and last != before:
            progress.advance_to(last["step"], f"loss {last['loss']:.2f}, {last['tokens_per_second']:,.0f} tokens/s")
