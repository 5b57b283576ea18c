"""Lists the runs of a root with their states as a tree: each branch below the run that it branched from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from services.common.errors import ArtifactError, RecipeError
from services.common.problem_list import list_names
from services.trainer.checkpoints.lookup import list_runs_command
from services.trainer.runs.status import RunStatus, read_statuses, run_names

STATUS_HEADINGS = (
    *("run", "state", "step", "loss", "validation", "tokens/s", "goodput", "chip-hours", "cost", "age"),
    "branched after",
)
_MAX_WIDTH = 10_000
UNKNOWN = "-"
"""Text of a number that is unknown."""
RUNS = "runs"
"""Name of the trainer's command that lists the runs. It takes no recipe."""


def list_runs(root: Path, *, as_json: bool = False) -> int:
    """Print the runs of a root as a tree with their states and newest numbers, or as one line of JSON for each."""
    runs = read_statuses(root)
    if not runs:
        raise ArtifactError(f"{root}: has no run. Pass the --root with which a run was trained.")
    if as_json:
        print_json(runs)
    else:
        print_table(STATUS_HEADINGS, *(describe_status(status, depth) for depth, status in _walk(runs)))
    return 0


def find_run(root: Path, name: str) -> str:
    """Return the run with this name or unique prefix of a name. Raises `RecipeError` if there is none."""
    names = run_names(root)
    found = [name] if name in names else [each for each in names if name and each.startswith(name)]
    if len(found) == 1:
        return found[0]
    raise RecipeError(
        f"{name!r} is {'a prefix of several names' if found else 'no run'} in {root}, which has "
        f"{list_names(found or names)}. `{list_runs_command(root)}` lists the runs with their states."
    )


def branches_of(runs: Sequence[RunStatus], run: str) -> list[RunStatus]:
    """Return the runs that branched from a run, in the order of the steps after which they did."""
    found = (each for each in runs if each.parent and each.parent.run == run)
    return sorted(found, key=lambda each: (each.branch_step, each.run))


def print_table(headings: Sequence[str], *rows: Sequence[str]) -> None:
    """Print a table. A terminal wraps lines that are too long, and the names of runs stay whole."""
    from rich.console import Console  # noqa: PLC0415 - 0.03 s, which other commands save
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=_MAX_WIDTH).print(table)


def print_json(runs: Sequence[RunStatus]) -> None:
    """Print the fields of each `RunStatus` in one line; times are ISO 8601."""
    for status in runs:
        fields = asdict(status) | {"parent": status.parent and status.parent.model_dump(mode="json")}
        print(json.dumps(fields, default=datetime.isoformat))


def describe_status(status: RunStatus, depth: int = 0) -> tuple[str, ...]:
    """Return the cells of STATUS_HEADINGS; `depth` indents the name."""
    state = status.state if status.exit_code in (None, 0) else f"{status.state} ({status.exit_code})"
    return (
        "  " * depth + status.run,
        state,
        f"{status.step:,}" if status.max_steps is None else f"{status.step:,} of {status.max_steps:,}",
        *_write_numbers(status),
        UNKNOWN if status.began_at is None else describe_age(datetime.now(UTC) - status.began_at),
        f"{status.branch_step:,} of {status.parent.run}" if status.parent else "",
    )


def describe_age(age: timedelta) -> str:
    """Return an age in its largest unit of days, hours, minutes or seconds, such as `3 h`."""
    seconds = max(0, round(age.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:,} {unit}"
    return f"{seconds} s"


def _write_numbers(status: RunStatus) -> Iterator[str]:
    for value, form in (
        (status.loss, "{:.4f}"),
        (status.validation_loss, "{:.4f}"),
        (status.tokens_per_second, "{:,.0f}"),
        (status.goodput, "{:.1%}"),
        (status.chip_hours, "{:,.1f}"),
        (status.cost, "${:,.2f}"),
    ):
        yield UNKNOWN if value is None else form.format(value)


def _walk(runs: Sequence[RunStatus]) -> Iterator[tuple[int, RunStatus]]:
    """Yield every run with its depth. A branch whose parent is gone from the root is at the top."""
    known = {status.run for status in runs}
    waiting = [(0, each) for each in reversed(runs) if each.parent is None or each.parent.run not in known]
    while waiting:
        depth, status = waiting.pop()
        yield depth, status
        waiting += [(depth + 1, child) for child in reversed(branches_of(runs, status.run))]
