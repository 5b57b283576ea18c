"""Sends the records of metrics.jsonl to Weights & Biases. A run goes on if that fails.

The command sends them in a thread: no step waits for a network, and workers need none.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from services.common.errors import EXIT_BUG, DeviceError
from services.common.process.background_thread import running_in_background
from services.common.process.command_line import one_of
from services.common.process.entry_point import exit_code_for
from services.common.process.telemetry import JsonLinesTail
from services.trainer.job import Job
from services.trainer.metrics.metric_table import known_metrics
from services.trainer.metrics.records import METRICS_FILE

logger = logging.getLogger(__name__)

TRACKERS = ("wandb",)
POLL_SECONDS = 1.0
CLOSE_SECONDS = 60.0
"""Seconds for which the end of a command waits for the last records to be sent."""


def require_trackers(names: list[str]) -> list[str]:
    """Check the option `--tracker` before nodes are held. Raises `DeviceError` for one that is not installed."""
    for name in one_of(TRACKERS)(names):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # W&B leaves a folder of that name
            raise DeviceError(f"--tracker {name}: not installed. Run `pip install {name}`, or omit the option.")
    return names


@contextmanager
def tracking(job: Job, names: Sequence[str]) -> Iterator[None]:
    """Send new records during the block, and the exit code of the error that ends it.

    A later command continues the run of W&B, which has the run's name. The library reads its own WANDB_ variables.
    Raises `DeviceError` if it cannot start.
    """
    if not names:
        yield
        return
    try:
        wandb: Any = importlib.import_module("wandb")
        config, name = job.recipe.model_dump(mode="json"), job.run
        run = wandb.init(project="millrace", id=name, name=name, resume="allow", dir=job.run_folder, config=config)
    except Exception as error:  # the library raises errors of any type; the user can act on this one
        raise DeviceError(f"--tracker wandb: {type(error).__name__}: {error}. Check its settings.") from error
    run.define_metric("*", step_metric="step")  # W&B's own steps must increase, but a rollback repeats steps
    outcome = {"exit_code": EXIT_BUG}
    tail = JsonLinesTail(job.run_folder / METRICS_FILE, from_end=True)
    with running_in_background(partial(_send, run, tail, outcome), "wandb", CLOSE_SECONDS):
        try:
            yield
            outcome["exit_code"] = 0
        except BaseException as error:
            outcome["exit_code"] = exit_code_for(error)
            raise


def _send(run: Any, tail: JsonLinesTail, outcome: dict[str, int], is_over: threading.Event) -> None:
    try:
        is_last = False
        while not is_last:
            is_last = is_over.wait(POLL_SECONDS)
            for record in tail.read():
                run.log(known_metrics(record))
        run.finish(outcome["exit_code"])
    except Exception:  # the library raises errors of any type, and no view ends a run
        logger.warning("wandb: failed and gets no more records; metrics.jsonl has every step", exc_info=True)
