"""Lists the runs of a root with their states as a tree: each branch below the run that it branched from.

The costs grow with the runs and with the commands that trained them, and not with their steps: of each run the listing
reads `run.json`, the records of its commands, the ends of the metrics and of the evaluations and the names of the
checkpoints, and the newest checkpoint's manifest where `run.json` is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.checkpoint import Ancestor
from services.common.artifacts.store import Address
from services.common.errors import ArtifactError
from services.common.process.command_line import require_text
from services.common.process.command_parser import CommandParser
from services.trainer.checkpoints.lookup import open_checkpoint
from services.trainer.job import RUN_FILE, run_folder
from services.trainer.run_status import RunStatus, read_status

logger = logging.getLogger(__name__)

_HEADINGS = ("run", "state", "step", "loss", "validation", "tokens/s", "cost", "age", "branched after")
UNKNOWN = "-"
"""Text of a number that is unknown."""
RUNS = "runs"
"""Name of the trainer's command that lists the runs. It takes no recipe."""


def list_runs(argv: list[str]) -> int:
    """Print the runs of a root as a tree, with their states, steps, losses, speeds, costs and ages."""
    parser = CommandParser(
        prog=f"python -m services.trainer {RUNS}",
        description="List the runs of a root, each branch below its parent: state, step, loss in nats per token, "
        "tokens/s, cost of the nodes that were held by on-demand prices, and age.",
        allow_abbrev=False,
    )
    parser.add_root()
    arguments = parser.parse_args(argv)
    require_text(arguments)
    runs = read_runs(arguments.root.absolute())
    if not runs:
        raise ArtifactError(f"{arguments.root}: has no run. Pass the --root with which a run was trained.")
    print(describe_runs(runs))
    return 0


class RunEntry(NamedTuple):
    """A run of a root."""

    run: str
    parent: str | None
    """Name of the run that this one branched from; None if it is no branch."""
    begin_step: int
    """Step after which it branched; 0 if it is no branch."""
    status: RunStatus


def read_runs(root: Path) -> list[RunEntry]:
    """Return the runs of a root by name; see `run_names`."""
    return [_read_run(root, run) for run in run_names(root)]


def run_names(root: Path) -> list[str]:
    """Return the names of the runs of a root, sorted: those with a file `run.json` or a checkpoint."""
    described = {path.parent.name for path in run_folder(root, "").glob(f"*/{RUN_FILE}")}
    kept = {path.name for path in (root / "checkpoint").glob("*") if path.is_dir()}
    return sorted(described | kept)


def describe_runs(runs: Sequence[RunEntry]) -> str:
    """Return a table of the runs, each branch indented below its parent."""
    now = datetime.now(UTC)
    return align_columns([_HEADINGS, *(_row(depth, entry, now) for depth, entry in _walk(runs))])


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of a table as lines whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def branches_of(runs: Sequence[RunEntry], run: str) -> list[RunEntry]:
    """Return the runs that branched from a run, in the order of the steps after which they did."""
    return sorted((entry for entry in runs if entry.parent == run), key=lambda entry: (entry.begin_step, entry.run))


def _walk(runs: Sequence[RunEntry]) -> Iterator[tuple[int, RunEntry]]:
    """Yield every run with its depth. A branch whose parent is gone from the root is at the top."""
    known = {entry.run for entry in runs}
    waiting = [(0, entry) for entry in reversed(runs) if entry.parent not in known]
    while waiting:
        depth, entry = waiting.pop()
        yield depth, entry
        waiting += [(depth + 1, child) for child in reversed(branches_of(runs, entry.run))]


def _row(depth: int, entry: RunEntry, now: datetime) -> tuple[str, ...]:
    status, begin = entry.status, f"{entry.begin_step:,} of {entry.parent}" if entry.parent else ""
    state = status.state if status.exit_code in (None, 0) else f"{status.state} ({status.exit_code})"
    return (
        "  " * depth + entry.run,
        state,
        write_step(status),
        *write_numbers(status),
        describe_age(now - status.began_at) if status.began_at else UNKNOWN,
        begin,
    )


def write_numbers(status: RunStatus) -> tuple[str, ...]:
    """Return the loss, the validation loss, the tokens/s and the cost of a run as texts."""
    return (
        write_loss(status.loss),
        write_loss(status.validation_loss),
        write_known(status.tokens_per_second, ",.0f"),
        UNKNOWN if status.cost is None else f"${status.cost:,.2f}",
    )


def write_step(status: RunStatus) -> str:
    return f"{status.step:,}" if status.max_steps is None else f"{status.step:,} of {status.max_steps:,}"


def write_loss(loss: float | None) -> str:
    return write_known(loss, ".4f" if loss is None or abs(loss) < 1e6 else ".4g")


def write_known(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def describe_age(age: timedelta) -> str:
    """Return an age in its largest unit of days, hours, minutes or seconds, such as `3 h`."""
    seconds = max(0, round(age.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:,} {unit}"
    return f"{seconds} s"


def _read_run(root: Path, run: str) -> RunEntry:
    status = read_status(root, run)
    parent = status.parent or _parent_of_checkpoint(root, status)
    return RunEntry(run, parent.run if parent else None, parent.step if parent else 0, status)


def _parent_of_checkpoint(root: Path, status: RunStatus) -> Ancestor | None:
    """Read a run's parent from its newest checkpoint where `run.json`, which has the steps too, is lost or damaged."""
    if status.max_steps is not None or status.checkpoint_step is None:
        return None
    collection = Address(root, "checkpoint", status.run, "").collection
    try:
        return open_checkpoint(collection, status.checkpoint_step, lambda _: None).manifest.checkpoint.parent
    except ArtifactError as error:
        logger.warning("whether %s is a branch is unknown: %s", status.run, error)
        return None
