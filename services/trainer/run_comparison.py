"""Compares runs of a root: their newest numbers, the recipe values in which they differ, and their curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import ArtifactError, RecipeError
from services.common.input.files import parse_json, read_file, unreadable
from services.common.input.problem_list import list_names
from services.common.process.brought_files import offer_file
from services.common.process.command_line import require_text
from services.common.process.command_parser import CommandParser
from services.trainer.checkpoints.lookup import list_runs_command
from services.trainer.job import RUN_FILE, run_folder
from services.trainer.report.comparison import write_comparison
from services.trainer.report.page import shorten
from services.trainer.run_status import RunStatus, read_status
from services.trainer.run_tree import UNKNOWN, align_columns, run_names, write_known, write_numbers, write_step

COMPARE = "compare"
"""Name of the trainer's command that compares runs. It takes no recipe."""
MOST_RUNS = 8
"""Runs that are compared at most: the page has as many colours."""
_MOST_CHARACTERS = 60
STATUS_HEADINGS = ("run", "state", "step", "loss", "validation", "tokens/s", "cost", "goodput", "chip-hours")


def compare_runs(argv: list[str]) -> int:
    """Print the newest numbers of runs and the recipe values in which they differ, and write comparison.html."""
    parser = CommandParser(
        prog=f"python -m services.trainer {COMPARE}",
        description="Compare runs of a root: their newest numbers, the recipe values in which they differ, and their "
        "curves in one page, comparison.html.",
        allow_abbrev=False,
    )
    parser.add_root()
    parser.add_argument("--runs", required=True, metavar="NAME,NAME", help="names of runs, or unique begins of names")
    arguments = parser.parse_args(argv)
    require_text(arguments)
    root = arguments.root.absolute()
    runs = find_runs(root, arguments.runs)
    recipes = [read_recipe_values(root, run) for run in runs]
    numbers = [STATUS_HEADINGS, *(describe_status(read_status(root, run)) for run in runs)]
    values = [("recipe value", *runs), *differing_values(recipes)]
    print(f"{align_columns(numbers)}\n")
    print(align_columns(values) if len(values) > 1 else "The recipes are identical.")
    path = write_comparison(root, runs, numbers, values)
    print(f"\n{path}")
    offer_file(path)
    return 0


def find_run(root: Path, name: str) -> str:
    """Return the run with this name, or the only one whose name begins so. Raises `RecipeError` if there is none."""
    names = run_names(root)
    if name in names:
        return name
    found = [each for each in names if each.startswith(name)] if name else []
    if len(found) == 1:
        return found[0]
    raise RecipeError(
        f"{name!r} is {'the begin of several names' if found else 'no run'} in {root}, which has "
        f"{list_names(found or names) or 'no run'}. `{list_runs_command(root)}` "
        f"lists the runs with their states."
    )


def find_runs(root: Path, names: str) -> list[str]:
    """Return the runs of a list with commas, without repetition; see `find_run`."""
    runs = list(dict.fromkeys(find_run(root, name.strip()) for name in names.split(",")))
    if not 2 <= len(runs) <= MOST_RUNS:
        raise RecipeError(f"{names!r} names {len(runs)} run(s): expected 2 to {MOST_RUNS} different runs, as a,b,c.")
    return runs


def read_recipe_values(root: Path, run: str) -> dict[str, Any]:
    """Return the recipe of a run by dotted names. Raises `ArtifactError` if the run's file is lost or damaged."""
    path = run_folder(root, run) / RUN_FILE
    try:
        return dict(_flatten(parse_json(read_file(path, path.parent))["recipe"]))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: damaged, or of another version: {error}. The trainer's command for this run writes it again."
        ) from error


def differing_values(recipes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the dotted name and the values of each recipe value that is not the same in all recipes."""
    for name in dict.fromkeys(name for recipe in recipes for name in recipe):
        values = [_write(recipe[name]) if name in recipe else UNKNOWN for recipe in recipes]
        if len(set(values)) > 1:
            yield (name, *(shorten(value, _MOST_CHARACTERS) for value in values))


def describe_status(status: RunStatus) -> tuple[str, ...]:
    """Return the cells of STATUS_HEADINGS."""
    goodput, chip_hours = write_known(status.goodput, ".1%"), write_known(status.chip_hours, ",.1f")
    return status.run, status.state, write_step(status), *write_numbers(status), goodput, chip_hours


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
