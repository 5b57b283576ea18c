"""Tells the state of a run, and its newest numbers, from the run's folder and the names of its checkpoints.

The reads grow with the commands that trained the run, one kilobyte for each, and with the evaluations of one line's
length; they do not grow with the steps: of the metrics only the end is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from services.common.artifacts.checkpoint import Ancestor
from services.common.artifacts.store import Address
from services.common.errors import EXIT_INTERRUPTED, TryAgain
from services.common.input.files import parse_json, read_file
from services.trainer.checkpoints.steps import newest_step
from services.trainer.evaluation.records import read_last_evaluation
from services.trainer.job import RUN_FILE, run_folder
from services.trainer.metrics.commands import CommandRecord, read_commands, sum_chip_hours, sum_cost
from services.trainer.metrics.records import read_last_step

State = Literal["running", "done", "stopped", "failed", "lost", "not started"]
"""State of a run.

- `running`: a command trains it.
- `done`: it has reached the `train.max_steps` of its newest command.
- `stopped`: its newest command ended with 75 or 130, and the same command continues.
- `failed`: its newest command ended with an error that a repetition does not mend.
- `lost`: its newest command ended without a word, as after SIGKILL or a loss of its node; the same command continues.
- `not started`: no command has trained it. It may have imported weights.
"""

_CONTINUED = (TryAgain.exit_code, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class RunStatus:
    """State and newest numbers of a run; a number is None where it is unknown."""

    run: str
    parent: Ancestor | None
    """Checkpoint of another run with which this one began; None if it is no branch, or if `run.json` is lost."""
    state: State
    exit_code: int | None
    """Exit code of the newest command; None while it runs, and if it was lost."""
    error: str | None
    """Begin of the message of the error that ended the newest command."""
    step: int
    """Optimizer steps done, by the newest record or the newest checkpoint; 0 if there is neither."""
    checkpoint_step: int | None
    """Step of the newest checkpoint."""
    max_steps: int | None
    """`train.max_steps` of the newest command."""
    tokens: int | None
    """Tokens of the steps that updated the weights, those of a branch's ancestors included."""
    total_tokens: int | None
    """`tokens` after the last step, if no further step is skipped."""
    tokens_per_second: float | None
    """Mean speed of the newest start of the workers, without its first step."""
    seconds_left: float | None
    """Seconds of the steps that are left, at `tokens_per_second`."""
    loss: float | None
    """Training loss of the newest step, in nats per token."""
    validation_loss: float | None
    """Validation loss of the newest evaluation, in nats per token."""
    goodput: float | None
    """Share of the time since the run began that went into steps of the newest state."""
    chip_hours: float | None
    """Hours for which commands held accelerators, times their number; None on CPUs."""
    cost: float | None
    """Dollars of the nodes that commands held, by on-demand prices of their begin; None without an instance type."""
    began_at: datetime | None
    updated_at: datetime | None
    """Newest time at which the run's command lived or recorded a step."""
    stepped_at: datetime | None
    """Time of the newest step."""


def read_status(root: Path, run: str, now: float | None = None) -> RunStatus:
    """Return the status of a run at the time `now`, in seconds since 1970; by default the present.

    A run that does not exist is `not started`. What cannot be read counts as absent.
    """
    folder = run_folder(root, run)
    commands, last, evaluation = read_commands(folder), read_last_step(folder), read_last_evaluation(folder)
    checkpoint_step = newest_step(Address(root, "checkpoint", run, "").collection)
    max_steps, parent = _read_description(folder)
    step = max(last["step"] if last else 0, checkpoint_step or 0)
    newest = commands[-1] if commands else None
    state = _state(newest, checkpoint_step or 0, max_steps, time.time() if now is None else now)
    tokens = (last or {}).get("tokens")
    tokens_left = (max_steps - step) * last["step_tokens"] if last and max_steps is not None else None
    speed = last.get("mean_tokens_per_second", last["tokens_per_second"]) if last else None
    return RunStatus(
        run=run,
        parent=parent,
        state=state,
        exit_code=newest.exit_code if newest else None,
        error=newest.error if newest else None,
        step=step,
        checkpoint_step=checkpoint_step,
        max_steps=max_steps,
        tokens=tokens,
        total_tokens=tokens + max(0, tokens_left) if tokens is not None and tokens_left is not None else None,
        tokens_per_second=speed,
        seconds_left=max(0, tokens_left) / speed if tokens_left is not None and speed else None,
        loss=last["loss"] if last else None,
        validation_loss=evaluation["loss"] if evaluation else None,
        goodput=last["goodput"] if last else None,
        chip_hours=sum_chip_hours(commands),
        cost=sum_cost(commands),
        began_at=_time(_begin(commands, last)),
        updated_at=_time(max((at for at in (_seen_at(newest), (last or {}).get("time")) if at), default=None)),
        stepped_at=_time((last or {}).get("time")),
    )


def _state(newest: CommandRecord | None, checkpoint_step: int, max_steps: int | None, now: float) -> State:
    if newest is None:
        if max_steps is not None and checkpoint_step >= max_steps:
            return "done"
        return "lost" if checkpoint_step else "not started"
    if newest.exit_code is None:
        return "running" if newest.lives(now) else "lost"
    if newest.exit_code == 0:
        return "done"
    return "stopped" if newest.exit_code in _CONTINUED else "failed"


def _read_description(folder: Path) -> tuple[int | None, Ancestor | None]:
    """Read from `run.json` the steps after which the run is complete, and its parent."""
    try:
        described = parse_json(read_file(folder / RUN_FILE, folder))
        steps, parent = described["recipe"]["train"]["max_steps"], described.get("parent")
        return (steps if type(steps) is int else None), Ancestor.model_validate(parent) if parent is not None else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, None


def _begin(commands: Sequence[CommandRecord], last: dict[str, Any] | None) -> float | None:
    times = [each.began_at for each in commands[:1]] + [at for at in [(last or {}).get("run_started_at")] if at]
    return min(times, default=None)


def _seen_at(newest: CommandRecord | None) -> float | None:
    return (newest.ended_at or newest.seen_at) if newest else None


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None
