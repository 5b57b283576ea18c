"""Divides the time of a run's training into phases: starts, training, and what was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from services.common.artifacts.manifest import Phase
from services.trainer.metrics.commands import CommandRecord

KILLED = "killed"
"""Phase of workers that ended without a record: they were killed, or their command was."""
FAILED = "failed"
"""Phase of workers that ended without a record at the end of a command that an error ended."""
RUNNING = "running"
"""Phase of the workers of a command that goes on."""


def divide_training(
    commands: Sequence[CommandRecord],
    events: Sequence[Mapping[str, Any]],
    attempts: Sequence[Mapping[str, Any]],
    now: float,
) -> list[Phase]:
    """Return the phases of a run's training at the time `now`, in seconds since 1970, oldest first.

    Workers that end by themselves record their start and their training as an attempt. The time of those that were
    killed is known from outside: it ends at the event of the restart, or at the end of their command.
    """
    phases = [phase for each in attempts for phase in _phases_of_attempt(each)]
    begins = [each["started_at"] for each in attempts]
    for command in commands:
        begin = command.began_at
        for name, end in _ends_of_workers(command, events, now):
            if end > begin and not any(begin <= each < end for each in begins):
                phases.append(_phase(name, begin, end - begin))
            begin = max(begin, end)
    return sorted(phases, key=lambda phase: phase.started_at)


def _phases_of_attempt(attempt: Mapping[str, Any]) -> Iterator[Phase]:
    begin, setup_seconds = attempt["started_at"], attempt["setup_seconds"]
    yield _phase("start", begin, setup_seconds)
    yield _phase("train", begin + setup_seconds, attempt["train_seconds"])


def _ends_of_workers(
    command: CommandRecord, events: Sequence[Mapping[str, Any]], now: float
) -> Iterator[tuple[str, float]]:
    """Yield how the workers of a command ended, and when: at each restart, and at the end of the command."""
    for event in events:
        if (event["event"], event.get("attempt")) == ("restart", command.attempt):
            at = event.get("time")
            if isinstance(at, int | float) and command.began_at <= at <= now:
                yield KILLED, float(at)
    if command.lives(now):
        yield RUNNING, command.seen_at
    elif command.exit_code is None:
        yield KILLED, command.seen_at
    elif command.exit_code and command.ended_at:
        yield FAILED, command.ended_at


def _phase(name: str, begin: float, seconds: float) -> Phase:
    return Phase(name=name, started_at=datetime.fromtimestamp(begin, UTC), seconds=seconds)
