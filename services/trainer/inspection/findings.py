"""Findings of `doctor`: rows of one table, each with a fact and the next step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.common.errors import (
    ArtifactError,
    DeviceError,
    MillraceError,
    RecipeError,
    StorageError,
    TryAgain,
)

MOST_SERIOUS_FIRST = [each.exit_code for each in (StorageError, DeviceError, ArtifactError, RecipeError, TryAgain)]


class Result(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """The run can start, but may be slow or end early."""
    PROBLEM = "problem"
    """The run would be refused, or would fail."""


@dataclass(frozen=True)
class Finding:
    check: str
    result: Result
    seen: str
    next: str = ""
    """Next step after a warning or a problem: a command, if one command does it."""
    exit_code: int = 0
    """Exit code of a problem; 0 otherwise."""


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Result.OK, seen)


def warning(check: str, seen: str, next_step: str) -> Finding:
    return Finding(check, Result.WARNING, seen, next_step)


def problem(check: str, error: MillraceError, next_step: str) -> Finding:
    return Finding(check, Result.PROBLEM, str(error), next_step, error.exit_code)


def run_check(check: str, find: Callable[[], Iterable[Finding]], next_step: str) -> list[Finding]:
    """Run one check. Its error becomes a problem after the findings before it, and does not stop other checks."""
    found = []
    try:
        for finding in find():
            found.append(finding)  # one by one, so that findings before an error stay
    except MillraceError as error:
        found.append(problem(check, error, next_step))
    except OSError as error:
        found.append(problem(check, StorageError(str(error)), next_step))
    return found


def merge_nodes(found: dict[str, list[Finding]]) -> list[Finding]:
    """Merge the findings of all nodes: all results `ok` of one check become one line, with the first node's facts."""
    if len(found) == 1:
        return next(iter(found.values()))
    merged = []
    for check in dict.fromkeys(finding.check for findings in found.values() for finding in findings):
        of_check = [(node, each) for node, findings in found.items() for each in findings if each.check == check]
        good = [each for _, each in of_check if each.result is Result.OK]
        if good:
            merged.append(ok(check, f"{len(good)} nodes, the first: {good[0].seen}"))
        bad = [(node, each) for node, each in of_check if each.result is not Result.OK]
        merged += [replace(each, seen=f"{node}: {each.seen}") for node, each in bad]
    return merged


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of the most serious problem; 0 if there is none."""
    codes = {finding.exit_code for finding in findings}
    return next((code for code in MOST_SERIOUS_FIRST if code in codes), max(codes, default=0))


def format_table(findings: Sequence[Finding]) -> str:
    width = max(len(finding.check) for finding in findings)
    lines = [f"{'check':<{width}}  result   seen"]
    for finding in findings:
        shown = [*finding.seen.splitlines(), *([f"next: {finding.next}"] if finding.next else [])]
        lines.append(f"{finding.check:<{width}}  {finding.result:<7}  {shown[0]}")
        lines += [" " * (width + 11) + line for line in shown[1:]]
    return "\n".join(lines)


def summarize(findings: Sequence[Finding]) -> str:
    results = [finding.result for finding in findings]
    counts = f"problems: {results.count(Result.PROBLEM)}, warnings: {results.count(Result.WARNING)}"
    return f"{counts}. " + (
        "Do the steps after `next:`, then run doctor again." if Result.PROBLEM in results else "The run can start."
    )
