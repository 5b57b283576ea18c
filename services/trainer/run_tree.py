"""Lists the runs of a root as a tree: each branch below the run that it branched from.

The costs grow with the runs and not with their steps: of each run the listing reads `run.json`, the end of the metrics
and the names of the checkpoints, and the newest checkpoint's manifest where `run.json` is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from services.common.artifacts.checkpoint import Ancestor
from services.common.artifacts.store import Address
from services.common.errors import ArtifactError
from services.common.input.files import parse_json, read_file
from services.common.process.command_line import require_text
from services.common.process.command_parser import CommandParser
from services.trainer.checkpoints.lookup import newest_step, open_checkpoint
from services.trainer.job import RUN_FILE, run_folder
from services.trainer.metrics.records import read_last_step

logger = logging.getLogger(__name__)

_HEADINGS = ("run", "branched after", "newest step", "loss")


RUNS = "runs"
"""Name of the trainer's command that lists the runs. It takes no recipe."""


def list_runs(argv: list[str]) -> int:
    """Print the runs of a root as a tree, with their newest steps and losses."""
    parser = CommandParser(
        prog=f"python -m services.trainer {RUNS}",
        description="List the runs of a root: each branch below its parent, with the newest step and its loss.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=Path, default=Path("fsx"), help="folder of all artifacts (default: ./fsx)")
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
    newest_step: int | None
    """Step of the newest checkpoint; None if there is none yet."""
    loss: float | None
    """Loss of the newest step that was recorded, in nats per token; None if its records are lost."""


def read_runs(root: Path) -> list[RunEntry]:
    """Return the runs of a root by name: those with a file `run.json` or a checkpoint."""
    described = {path.parent.name for path in run_folder(root, "").glob(f"*/{RUN_FILE}")}
    kept = {path.name for path in (root / "checkpoint").glob("*") if path.is_dir()}
    return [_read_run(root, run) for run in sorted(described | kept)]


def describe_runs(runs: Sequence[RunEntry]) -> str:
    """Return a table of the runs, each branch indented below its parent."""
    rows = [_HEADINGS, *(_row(depth, entry) for depth, entry in _walk(runs))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
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


def _row(depth: int, entry: RunEntry) -> tuple[str, ...]:
    begin = f"{entry.begin_step:,} of {entry.parent}" if entry.parent else ""
    newest = "none yet" if entry.newest_step is None else f"{entry.newest_step:,}"
    return "  " * depth + entry.run, begin, newest, "unknown" if entry.loss is None else f"{entry.loss:.4f}"


def _read_run(root: Path, run: str) -> RunEntry:
    collection = Address(root, "checkpoint", run, "").collection
    newest = newest_step(collection)
    parent = _read_parent(run_folder(root, run), collection, newest)
    last = read_last_step(run_folder(root, run))
    begin = parent.step if parent else 0
    return RunEntry(run, parent.run if parent else None, begin, newest, last["loss"] if last else None)


def _read_parent(folder: Path, collection: Path, newest: int | None) -> Ancestor | None:
    """Read a run's parent from its file, or from its newest checkpoint where the file is lost or damaged."""
    try:
        described = parse_json(read_file(folder / RUN_FILE, folder))
        return Ancestor.model_validate(described["parent"]) if "parent" in described else None
    except (OSError, ValueError, TypeError, ValidationError):
        pass
    if newest is None:
        return None
    try:
        return open_checkpoint(collection, newest, lambda _: None).manifest.checkpoint.parent
    except ArtifactError as error:
        logger.warning("whether %s is a branch is unknown: %s", folder.name, error)
        return None
