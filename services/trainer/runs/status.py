"""Tells the state and the newest numbers of the runs of a root, and lists them as a tree: branches below their parents.

The reads grow with the commands that trained a run, one kilobyte for each, and with its evaluations; they do not grow
with the steps, because of the metrics only the end is read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from services.common.artifacts.checkpoint import Ancestor
from services.common.errors import EXIT_INTERRUPTED, ArtifactError, MillraceError, RecipeError, TryAgain
from services.common.problem_list import list_names
from services.common.process.progress import write_duration
from services.common.recipe.changes import differing_values
from services.trainer.checkpoints.lookup import run_command
from services.trainer.checkpoints.steps import newest_step
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import RUN_FILE, checkpoint_collection, run_folder
from services.trainer.metrics.commands import CommandRecord, read_commands, sum_known
from services.trainer.metrics.records import read_last_step
from services.trainer.runs.description import read_description

State = Literal["running", "done", "stopped", "failed", "lost", "not started"]
"""State of a run.

- `running`: a command trains it.
- `done`: it has reached the `train.max_steps` of its newest command.
- `stopped`: its newest command ended with 75 or 130, and the same command continues.
- `failed`: its newest command ended with an error that a repetition does not mend.
- `lost`: its newest command recorded no exit code (SIGKILL or node loss); the same command continues.
- `not started`: no command has trained it. It may have imported weights.
"""


STATUS_HEADINGS = (
    *("run", "state", "step", "loss", "validation", "tokens/s", "goodput", "chip-hours", "cost", "age"),
    "branched after",
)
_DROPPED = ("goodput", "tokens/s", "age", "chip-hours", "loss", "branched after", "cost")
"""Columns that a narrow terminal leaves out, the first one first."""
_DIFFERENCE_WIDTH = 28
"""Characters that a line of the last column needs."""
_NO_DIFFERENCE = ("name", "train.max_steps", "train.branch")
"""Starts of recipe values that other columns show."""
_MAX_WIDTH = 10_000
UNKNOWN = "-"
"""Text of a number that is unknown."""


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
    """Start of the message of the error that ended the newest command."""
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
    """Dollars of the nodes that commands held, by on-demand prices of their start; None without an instance type."""
    began_at: datetime | None
    recipe: dict[str, Any]
    """The resolved recipe of the newest command; empty if `run.json` is lost."""

    @property
    def branch_step(self) -> int:
        """Step of the parent's checkpoint; 0 if the run is no branch."""
        return self.parent.step if self.parent else 0


def list_runs(root: Path, *, as_json: bool = False) -> int:
    """Print the runs of a root as a tree with their states and newest numbers, or as one line of JSON for each."""
    runs = read_statuses(root)
    if not runs:
        raise ArtifactError(f"{root}: has no run. Pass the --root with which a run was trained.")
    if as_json:
        print_json(runs)
    else:
        known, differences = {status.run for status in runs}, _describe_differences(runs)
        top = [each for each in runs if each.parent is None or each.parent.run not in known]
        rows = [(*describe_status(each, depth), differences[each.run]) for depth, each in _walk(runs, top)]
        print_table(*fit_columns([(*STATUS_HEADINGS, "differs in"), *rows]))
    return 0


def find_run(root: Path, name: str) -> str:
    """Return the run with this name or unique prefix of a name. Raises `RecipeError` if there is none."""
    found = find_runs(root, name)
    if len(found) > 1:
        raise RecipeError(f"{name!r} matches {len(found)} runs in {root}: {list_names(found)}; give a full name.")
    return found[0]


def find_runs(root: Path, name: str) -> list[str]:
    """Return the run with this name, or all whose names begin with it. Raises `RecipeError` if there is none."""
    names = run_names(root)
    if found := [name] if name in names else [each for each in names if name and each.startswith(name)]:
        return found
    told = f"{list_names(names)}. `{run_command(root, 'runs')}` lists them with their states" if names else "no runs"
    raise RecipeError(f"no run matches {name!r}: {root} has {told}.")


def _describe_differences(runs: Sequence[RunStatus]) -> dict[str, str]:
    """Describe the values in which each run differs from others of its recipe's name, by the last words of the keys."""
    described = {}
    for name in {each.recipe.get("name") for each in runs}:
        group = [each for each in runs if each.recipe.get("name") == name]
        values = differing_values([each.recipe for each in group])
        shown = [(key.split(".")[-1], texts) for key, texts in values.items() if not key.startswith(_NO_DIFFERENCE)]
        for number, each in enumerate(group):
            described[each.run] = ", ".join(f"{key} {texts[number]}" for key, texts in shown)
    return described


def branches_of(runs: Sequence[RunStatus], run: str) -> list[RunStatus]:
    """Return the runs that branched from a run, in the order of the steps after which they did."""
    found = (each for each in runs if each.parent and each.parent.run == run)
    return sorted(found, key=lambda each: (each.branch_step, each.run))


def fit_columns(rows: Sequence[Sequence[str]], width: int | None = None) -> list[tuple[str, ...]]:
    """Return a table, whose first row has the headings, without empty columns, and with as many as a terminal has room
    for. The last column is long: its cells take several lines.
    """
    columns = [column for column in zip(*rows, strict=True) if not {*column[1:]} <= {UNKNOWN, ""}]
    for name in _DROPPED:
        widths = [max(map(len, column)) for column in columns]
        if sum(widths[:-1], min(widths[-1], _DIFFERENCE_WIDTH) + 2 * len(columns)) <= (width or terminal_width()):
            break
        columns = [column for column in columns if column[0] != name]
    return list(zip(*columns, strict=True))


def terminal_width() -> int:
    """Return the columns of the terminal or of COLUMNS; without either a line has any length, for other programs."""
    return shutil.get_terminal_size((_MAX_WIDTH, 0)).columns


def print_table(headings: Sequence[str], *rows: Sequence[str]) -> None:
    """Print a table. Long cells take several lines, and the names of runs, in the first column, stay whole."""
    from rich.console import Console  # noqa: PLC0415 - 0.03 s, which other commands save
    from rich.table import Column, Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    columns = (Column(heading, no_wrap=number == 0, overflow="fold") for number, heading in enumerate(headings))
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=terminal_width()).print(table)


def print_json(runs: Sequence[RunStatus]) -> None:
    """Print the fields of each `RunStatus` in one line; times are ISO 8601."""
    for status in runs:
        print(TypeAdapter(RunStatus).dump_json(status).decode())


def describe_status(status: RunStatus, depth: int = 0) -> tuple[str, ...]:
    """Return the cells of STATUS_HEADINGS; `depth` indents the name."""
    numbers = (
        (status.loss, "{:.4f}"),
        (status.validation_loss, "{:.4f}"),
        (status.tokens_per_second, "{:,.0f}"),
        (status.goodput, "{:.1%}"),
        (status.chip_hours, "{:,.1f}"),
        (status.cost, "${:,.2f}"),
    )
    return (
        "  " * depth + status.run,
        status.state if status.exit_code in (None, 0) else f"{status.state} ({status.exit_code})",
        f"{status.step:,}" if status.max_steps is None else f"{status.step:,}/{status.max_steps:,}",
        *(UNKNOWN if value is None else form.format(value) for value, form in numbers),
        write_duration(round(time.time() - status.began_at.timestamp())) if status.began_at else UNKNOWN,
        f"{status.branch_step:,}{'' if depth else f' of {status.parent.run}'}" if status.parent else "",
    )


def read_statuses(root: Path) -> list[RunStatus]:
    """Return the runs of a root by name; see `run_names`."""
    return [read_status(root, run) for run in run_names(root)]


def run_names(root: Path) -> list[str]:
    """Return the names of the runs of a root, sorted: those with a file `run.json` or a checkpoint."""
    described = {path.parent.name for path in run_folder(root, "").glob(f"*/{RUN_FILE}")}
    kept = {path.name for path in (root / "checkpoint").glob("*") if path.is_dir()}
    return sorted(described | kept)


def read_status(root: Path, run: str, now: float | None = None) -> RunStatus:
    """Return the status of a run at the time `now`, in seconds since 1970; by default the present.

    A run that does not exist is `not started`. What cannot be read counts as absent.
    """
    folder = run_folder(root, run)
    commands, last, evaluations = read_commands(folder), read_last_step(folder) or {}, read_evaluations(folder)
    checkpoint_step = newest_step(checkpoint_collection(root, run))
    max_steps, parent, recipe = None, None, dict[str, Any]()
    with suppress(MillraceError, ValueError, TypeError, KeyError):
        described = read_description(folder)
        parent, recipe = described.parent, described.recipe
        max_steps = int(recipe["train"]["max_steps"])
    step = max(last.get("step", 0), checkpoint_step or 0)
    newest = commands[-1] if commands else None
    tokens, speed = last.get("tokens"), last.get("mean_tokens_per_second", last.get("tokens_per_second"))
    tokens_left = max(0, max_steps - step) * last["step_tokens"] if last and max_steps is not None else None
    began = min(filter(None, [*(each.began_at for each in commands[:1]), last.get("run_started_at")]), default=None)
    return RunStatus(
        run=run,
        parent=parent,
        state=_state(newest, checkpoint_step or 0, max_steps, time.time() if now is None else now),
        exit_code=newest.exit_code if newest else None,
        error=newest.error if newest else None,
        step=step,
        checkpoint_step=checkpoint_step,
        max_steps=max_steps,
        tokens=tokens,
        total_tokens=tokens + tokens_left if tokens is not None and tokens_left is not None else None,
        tokens_per_second=speed,
        seconds_left=tokens_left / speed if tokens_left is not None and speed else None,
        loss=last.get("loss"),
        validation_loss=evaluations[-1]["loss"] if evaluations else None,
        goodput=last.get("goodput"),
        chip_hours=sum_known(each.chip_hours for each in commands),
        cost=sum_known(each.dollars for each in commands),
        began_at=datetime.fromtimestamp(began, UTC) if began else None,
        recipe=recipe,
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
    return "stopped" if newest.exit_code in (TryAgain.exit_code, EXIT_INTERRUPTED) else "failed"


def _walk(runs: Sequence[RunStatus], level: Sequence[RunStatus], depth: int = 0) -> Iterator[tuple[int, RunStatus]]:
    """Yield the runs of a level, each with its depth and followed by its branches."""
    for each in level:
        yield depth, each
        yield from _walk(runs, branches_of(runs, each.run), depth + 1)
