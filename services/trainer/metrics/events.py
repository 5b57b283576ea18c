"""Records events of a run besides its steps, from workers and from the command, in `events.jsonl`.

Every event has `event` (its kind), `time`, and `attempt` and `start`, which identify the start of the workers. People
and reports read the file; beside them only restarts are counted in it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from services.common.process.telemetry import JsonLinesTail
from services.trainer.job import Job
from services.trainer.metrics.records import read_lines

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"

Kind = Literal[
    "watchdog",
    "restart",
    "restarted",
    "nan",
    "loss_healed",
    "loss_spike",
    "loss_deviates_at_end",
    "rollback",
    "rollbacks_exhausted",
    "straggler",
    "fallback",
    "recovered",
    "copy_left_out",
    "cache_miss",
    "short_notice",
    "checkpoint_failed",
    "diverged",
]

_WARNINGS: dict[str, str] = {
    "fallback": "resuming from the newest intact checkpoint, step {to_step}; damaged:{damages}",
    "recovered": "resuming from step {step}, copied from the nodes' memory (newest checkpoint: {committed_step})",
    "loss_deviates_at_end": (
        "the run ends while its loss has deviated since step {first_step}. Raise train.max_steps to let it recover, or "
        "export an earlier checkpoint"
    ),
    "rollback": (
        "loss spike up to step {step}: rolled back to step {to_step} (wanted: {wanted_step}), skipping batches "
        "{first_batch} to {last_batch}"
    ),
    "rollbacks_exhausted": (
        "loss spike up to step {step} after {rollbacks} rollbacks (train.loss_spike_max_rollbacks): training "
        "goes on. A lower optimizer.learning_rate makes another run, which may be more stable"
    ),
    "cache_miss": (
        "{files} files were compiled that the compile cache lacks. Train with the image, or from the path of the "
        "virtual environment, that compiled it: docs/operations/runbooks/cache-miss.md"
    ),
    "short_notice": "{message}",
}
"""Warnings of the command by the kind of event, with the event's fields; most events need none."""


def record_event(job: Job, event: Kind, **facts: Any) -> None:
    """Append an event. An event that cannot be written is only logged, and the run goes on."""
    line = {"event": event, "time": time.time(), "attempt": job.attempt, "start": job.start_number, **facts}
    if event not in ("watchdog", "restart", "restarted", "fallback"):  # the callers log these as sentences
        logger.warning("%s: %s", event, ", ".join(f"{name}={value}" for name, value in facts.items()))
    try:
        # One write call per event, because several processes append to this file.
        with (job.run_folder / EVENTS_FILE).open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        logger.warning("the event could not be written: %s", error)


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """Return the run's events, oldest first, without lines that cannot be read."""
    return read_lines(run_folder / EVENTS_FILE, {"event"})


def count_events(run_folder: Path) -> dict[str, int]:
    """Count events by kind; a NaN's kind includes its cause, as in `nan (data)`."""
    names = (
        f"nan ({event.get('cause')})" if event["event"] == "nan" else event["event"]
        for event in read_events(run_folder)
    )
    return dict(Counter(names))


def count_restarts(job: Job) -> int:
    """Count the restarts of the workers in the job's attempt."""
    return _restarts_of(job).count("restart")


def is_restarting(job: Job) -> bool:
    """Whether the workers of the job's attempt were lost, and those of the newest start have not taken a step yet."""
    return _restarts_of(job)[-1:] == ["restart"]


def _restarts_of(job: Job) -> list[str]:
    """Return each loss of the attempt's workers, `restart`, and each first step after one, `restarted`."""
    ours = [event["event"] for event in read_events(job.run_folder) if event.get("attempt") == job.attempt]
    return [event for event in ours if event in ("restart", "restarted")]


class EventTail:
    """Reads the events of one attempt at the command as they come: each call reads what was appended since the last."""

    def __init__(self, job: Job) -> None:
        self._tail, self._attempt = JsonLinesTail(job.run_folder / EVENTS_FILE), job.attempt

    def read(self) -> list[dict[str, Any]]:
        """Return the attempt's events since the last call, without lines that cannot be read."""
        return [each for each in self._tail.read() if "event" in each and each.get("attempt") == self._attempt]


def warnings_of(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return what the command shows as warnings."""
    return [_WARNINGS[event["event"]].format_map(_as_texts(event)) for event in events if event["event"] in _WARNINGS]


def _as_texts(event: dict[str, Any]) -> dict[str, Any]:
    return {name: "\n  ".join(["", *value]) if isinstance(value, list) else value for name, value in event.items()}
