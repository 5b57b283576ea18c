"""Sends the records of metrics.jsonl to experiment trackers. A run goes on if a tracker fails.

The command sends them in a thread: no step waits for a tracker's network, and workers need no network.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from services.common.errors import EXIT_BUG, DeviceError, Interrupted, MillraceError, TryAgain
from services.common.input.credentials import mask_values
from services.trainer.job import Job
from services.trainer.metrics.records import MetricsTail, known_metrics

logger = logging.getLogger(__name__)

PROJECT = "millrace"
POLL_SECONDS = 1.0
CLOSE_SECONDS = 60.0
"""Seconds for which the end of a command waits for its trackers to take the last records."""


class Tracker(Protocol):
    """An experiment tracker, which gets the metrics of every new record."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def close(self, exit_code: int) -> None: ...


class Wandb:
    """A run of Weights & Biases, which a later command continues. The library reads its own WANDB_ variables."""

    def __init__(self, job: Job) -> None:
        wandb: Any = importlib.import_module("wandb")
        recipe = job.recipe.model_dump(mode="json")
        self._run = wandb.init(
            project=PROJECT, id=job.run, name=job.run, resume="allow", dir=job.run_folder, config=mask_values(recipe)
        )
        # W&B's own steps must increase, but a run that rolls back or resumes repeats steps.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code)


class Mlflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, which a later command continues."""

    def __init__(self, job: Job) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._new_metric = importlib.import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        found = self._client.search_runs([number], f"tags.millrace_run = '{job.run}'", max_results=1)
        run = found[0] if found else self._client.create_run(number, run_name=job.run, tags={"millrace_run": job.run})
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")  # an earlier command has ended it

    def log(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._new_metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, exit_code: int) -> None:
        is_stopped = exit_code in (TryAgain.exit_code, Interrupted.exit_code)
        self._client.set_terminated(self._id, "KILLED" if is_stopped else "FAILED" if exit_code else "FINISHED")


def mlflow_name(name: str) -> str:
    """Return a name that MLflow takes: at most 250 word characters, dashes and spaces, with one slash."""
    metric, slash, label_value = name.partition("/")
    return (metric + slash + re.sub(r"[^\w -]", "_", label_value))[:250]


TRACKERS: dict[str, Callable[[Job], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


def require_trackers(names: Sequence[str]) -> None:
    """Raise `DeviceError` if a requested tracker is not installed."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # W&B leaves a folder of that name
            raise DeviceError(
                f"--tracker {name}: the package is not installed here. Install it with "
                f"`./bootstrap uv pip install --python {sys.executable} {name}`, for an image add it to "
                f"services/trainer/requirements.txt, or omit the option: metrics.jsonl and TensorBoard have every step."
            )


@contextmanager
def tracking(job: Job, names: Sequence[str]) -> Iterator[None]:
    """Send new records to the trackers during the block. Raises `DeviceError` if a tracker cannot be started."""
    following = _Following(MetricsTail(job.run_folder))
    exit_code = EXIT_BUG
    try:
        for name in dict.fromkeys(names):
            following.trackers[name] = _open(name, job)
        if following.trackers:
            following.start()
        yield
        exit_code = 0
    except MillraceError as error:
        exit_code = error.exit_code
        raise
    finally:
        following.end(exit_code)


def _open(name: str, job: Job) -> Tracker:
    try:
        return TRACKERS[name](job)
    except Exception as error:  # libraries raise errors of any type; the user can act on this one
        raise DeviceError(
            f"--tracker {name}: could not be started: {type(error).__name__}: {error}. Check its settings, or omit the "
            f"option."
        ) from error


class _Following:
    """Holds the trackers of a command and the thread that sends records to them."""

    def __init__(self, tail: MetricsTail) -> None:
        self.trackers: dict[str, Tracker] = {}
        self._tail, self._stop, self._exit_code = tail, threading.Event(), 0
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, exit_code: int) -> None:
        """Send the last records and the command's exit code."""
        self._exit_code = exit_code
        self._stop.set()
        if not self.trackers:
            return
        if not self._thread.ident:  # another tracker could not be started
            self.start()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s: did not take the last records within %.0f s", ", ".join(self.trackers), CLOSE_SECONDS)

    def _follow(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._stop.wait(POLL_SECONDS)
            records = self._tail.read()
            for name, tracker in list(self.trackers.items()):
                try:
                    for record in records:
                        tracker.log(record["step"], known_metrics(record))
                    if is_over:
                        tracker.close(self._exit_code)
                except Exception as error:  # libraries raise errors of any type, and no view ends a run
                    logger.warning(
                        "%s: failed and gets no more records: %s. metrics.jsonl has every step.",
                        name,
                        error,
                        exc_info=True,
                    )
                    del self.trackers[name]
