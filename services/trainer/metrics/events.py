"""What happened to a run besides its steps: `events.jsonl`, written by workers and by the command.

Every event has `event` (its kind), `time`, and `attempt` and `start`, which name the start of the workers.
The file is a record for people: no decision is read from it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from services.common.errors import StorageError
from services.common.input.credentials import mask_values
from services.common.input.files import open_for_append
from services.common.input.problem_list import list_problems
from services.common.process.telemetry import read_json_lines
from services.trainer.job import Job

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"

Kind = Literal["watchdog", "restart", "nan", "loss_spike", "rollback", "straggler", "fallback", "short_notice"]


def record_event(job: Job, event: Kind, **facts: Any) -> None:
    """Append an event. One that cannot be written is logged: what it tells of goes on without it."""
    line = {"event": event, "time": time.time(), "attempt": job.attempt, "start": job.start_number, **facts}
    if event not in ("watchdog", "restart", "fallback"):  # of which a sentence was logged
        logger.warning("%s: %s", event, ", ".join(f"{name}={value}" for name, value in facts.items()))
    try:
        # One write to the file's end: workers of several processes write here.
        with open_for_append(job.run_folder / EVENTS_FILE) as file:
            os.write(file.fileno(), json.dumps(mask_values(line)).encode() + b"\n")
    except (OSError, StorageError) as error:
        logger.warning("the event could not be written: %s", error)


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """Oldest first; lines that cannot be read are left out."""
    try:
        lines = read_json_lines(run_folder / EVENTS_FILE)
    except OSError as error:  # a run goes on without them
        logger.warning("%s cannot be read: %s", run_folder / EVENTS_FILE, error)
        return []
    return [line for line in lines if line is not None and isinstance(line.get("event"), str)]


def count_events(run_folder: Path) -> dict[str, int]:
    """By kind; of NaNs also by cause, as `nan (data)`."""
    return dict(Counter(_name(event) for event in read_events(run_folder)))


def explain_loss(job: Job, error: Exception) -> str:
    """What lost the workers of this start: what a watchdog wrote, and else what the launcher saw."""
    event = find_watchdog_event(job)
    return f"{event.get('message')}\n{error}" if event else str(error)


def find_watchdog_event(job: Job) -> dict[str, Any] | None:
    """What a watchdog wrote of this start of the workers."""
    for event in reversed(read_events(job.run_folder)):
        if (event["event"], event.get("attempt"), event.get("start")) == ("watchdog", job.attempt, job.start_number):
            return event
    return None


class NewWarnings:
    """What a command says of what its workers met and went on from: checkpoints that were passed over, and a notice
    that is too short for one. The file is read where it has grown alone.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._num_bytes, self._num_read = job, 0, 0

    def read(self) -> list[str]:
        """A text for each since the last call."""
        try:
            num_bytes = (self._job.run_folder / EVENTS_FILE).stat().st_size
        except OSError:  # no event yet
            return []
        if num_bytes == self._num_bytes:
            return []
        self._num_bytes, attempt = num_bytes, self._job.attempt
        events = read_events(self._job.run_folder)
        found = [each for each in events if each["event"] in _WARNINGS and each.get("attempt") == attempt]
        new, self._num_read = found[self._num_read :], len(found)
        return [_WARNINGS[each["event"]](each) for each in new]


def _describe_fallback(event: dict[str, Any]) -> str:
    damages = event.get("damages")
    found = damages if isinstance(damages, list) else [damages]
    told = "\n  ".join(list_problems(map(str, found), "damaged checkpoints"))
    step = event.get("to_step")
    return f"the run goes on after step {step}, from the newest checkpoint that is whole. Damaged:\n  {told}"


_WARNINGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "fallback": _describe_fallback,
    "short_notice": lambda event: str(event.get("message")),
}


def _name(event: dict[str, Any]) -> str:
    return f"{event['event']} ({event.get('cause')})" if event["event"] == "nan" else str(event["event"])
