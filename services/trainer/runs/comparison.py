"""Compares runs of a root: their newest numbers, the recipe values in which they differ, and their curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import RecipeError
from services.trainer.job import run_folder
from services.trainer.report.comparison import write_comparison
from services.trainer.runs.description import read_description
from services.trainer.runs.listing import STATUS_HEADINGS, UNKNOWN, describe_status, find_run, print_json, print_table
from services.trainer.runs.status import read_status

COMPARE = "compare"
"""Name of the trainer's command that compares runs. It takes no recipe."""
MAX_RUNS = 8
"""Runs that are compared at most: the page has as many colours."""
_MAX_LENGTH = 60


def compare_runs(root: Path, names: str, *, as_json: bool = False) -> int:
    """Print the newest numbers of runs and the recipe values in which they differ, and write comparison.html.

    With `as_json` print one line for each run, and write no page. `names` are names or unique prefixes, with commas.
    """
    runs = find_runs(root, names)
    statuses = [read_status(root, run) for run in runs]
    if as_json:
        print_json(statuses)
        return 0
    numbers = [STATUS_HEADINGS, *map(describe_status, statuses)]
    values = [("recipe value", *runs), *differing_values([read_recipe_values(root, run) for run in runs])]
    print_table(*numbers)
    print()
    print_table(*values)
    path = write_comparison(root, runs, numbers, values)
    print(f"\n{path}")
    return 0


def find_runs(root: Path, names: str) -> list[str]:
    """Return the runs of a list with commas, without repetition; see `find_run`."""
    runs = list(dict.fromkeys(find_run(root, name.strip()) for name in names.split(",")))
    if not 2 <= len(runs) <= MAX_RUNS:
        raise RecipeError(f"{names!r} names {len(runs)} run(s): expected 2 to {MAX_RUNS} different runs, as a,b,c.")
    return runs


def read_recipe_values(root: Path, run: str) -> dict[str, Any]:
    """Return the recipe of a run by dotted names. Raises `ArtifactError` if the run's file is damaged."""
    return dict(_flatten(read_description(run_folder(root, run)).recipe))


def differing_values(recipes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the dotted name and the values of each recipe value that is not the same in all recipes."""
    for name in dict.fromkeys(name for recipe in recipes for name in recipe):
        values = [_write(recipe[name]) if name in recipe else UNKNOWN for recipe in recipes]
        if len(set(values)) > 1:
            yield (
                name,
                *(each if len(each) <= _MAX_LENGTH else f"{each[:_MAX_LENGTH]} [...]" for each in values),
            )


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
