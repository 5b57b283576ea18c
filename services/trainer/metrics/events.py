"""Records events of a run besides its steps, from workers and from the command, in `events.jsonl`.

Every event has `event` (its kind), `time`, and `attempt` and `start`, which identify the start of the workers. People
and reports read the file; no decision depends on it, except for the text of an error.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from services.common.errors import StorageError
from services.common.input.credentials import mask_values
from services.common.input.files import open_for_append
from services.common.input.problem_list import list_problems
from services.common.process.telemetry import JsonLinesTail, read_json_lines
from services.trainer.job import Job

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
    "setting",
    "straggler",
    "fallback",
    "short_notice",
    "checkpoint_failed",
    "diverged",
]


def record_event(job: Job, event: Kind, **facts: Any) -> None:
    """Append an event. An event that cannot be written is only logged, and the run goes on."""
    line = {"event": event, "time": time.time(), "attempt": job.attempt, "start": job.start_number, **facts}
    if event not in ("watchdog", "restart", "restarted", "fallback"):  # the callers log these as sentences
        logger.warning("%s: %s", event, ", ".join(f"{name}={value}" for name, value in facts.items()))
    try:
        # One write call per event, because several processes append to this file.
        with open_for_append(job.run_folder / EVENTS_FILE) as file:
            os.write(file.fileno(), json.dumps(mask_values(line)).encode() + b"\n")
    except (OSError, StorageError) as error:
        logger.warning("the event could not be written: %s", error)


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """Return the run's events, oldest first, without lines that cannot be read."""
    try:
        lines = read_json_lines(run_folder / EVENTS_FILE)
    except OSError as error:  # a run goes on without its events
        logger.warning("%s cannot be read: %s", run_folder / EVENTS_FILE, error)
        return []
    return [line for line in lines if line is not None and isinstance(line.get("event"), str)]


def count_events(run_folder: Path) -> dict[str, int]:
    """Count events by kind; a NaN's kind includes its cause, as in `nan (data)`."""
    return dict(Counter(_name(event) for event in read_events(run_folder)))


def count_restarts(job: Job) -> int:
    """Count the restarts of the workers in the job's attempt."""
    restarts = [each for each in read_events(job.run_folder) if each["event"] == "restart"]
    return sum(each.get("attempt") == job.attempt for each in restarts)


class EventTail:
    """Reads the events of one attempt at the command as they come: each call reads what was appended since the last."""

    def __init__(self, job: Job) -> None:
        self._tail, self._attempt = JsonLinesTail(job.run_folder / EVENTS_FILE), job.attempt

    def read(self) -> list[dict[str, Any]]:
        """Return the attempt's events since the last call, without lines that cannot be read."""
        return [
            each
            for each in self._tail.read()
            if isinstance(each.get("event"), str) and each.get("attempt") == self._attempt
        ]


def warnings_of(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return the sentences that the command shows as warnings; most events need none."""
    return [_WARNINGS[event["event"]](event) for event in events if event["event"] in _WARNINGS]


def _describe_fallback(event: dict[str, Any]) -> str:
    damages = event.get("damages")
    found = damages if isinstance(damages, list) else [damages]
    listed = "\n  ".join(list_problems(map(str, found), "damaged checkpoints"))
    return f"the run continues from the newest intact checkpoint, of step {event.get('to_step')}. Damaged:\n  {listed}"


def _describe_rollback(event: dict[str, Any]) -> str:
    skipped, to_step = f"batches {event.get('first_batch')} to {event.get('last_batch')}", event.get("to_step")
    text = f"the loss spiked up to step {event.get('step')}: the run goes back to step {to_step} and skips {skipped}"
    if to_step != event.get("wanted_step") and event.get("to_step", 0) > event.get("wanted_step", 0):
        text += f"; no checkpoint of step {event.get('wanted_step')} or before is left, so fewer batches are skipped"
    return text


def _describe_exhausted(event: dict[str, Any]) -> str:
    return (
        f"the loss spiked up to step {event.get('step')}, and the run has gone back {event.get('rollbacks')} times, as "
        f"often as train.loss_spike_max_rollbacks allows: it goes on from the spike. A lower optimizer.learning_rate "
        f"makes another run, which may be more stable"
    )


def _describe_deviation(event: dict[str, Any]) -> str:
    return (
        f"the run ends while its loss deviates, since step {event.get('first_step')}, which may be the begin of a "
        f"spike. Raise train.max_steps to let it heal or go back, or export an earlier checkpoint"
    )


_WARNINGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "fallback": _describe_fallback,
    "loss_deviates_at_end": _describe_deviation,
    "rollback": _describe_rollback,
    "rollbacks_exhausted": _describe_exhausted,
    "short_notice": lambda event: str(event.get("message")),
}


def _name(event: dict[str, Any]) -> str:
    return f"{event['event']} ({event.get('cause')})" if event["event"] == "nan" else str(event["event"])
