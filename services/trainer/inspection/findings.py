"""Findings of `doctor`: rows of one table, each with a fact and the next step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError, StorageError, TryAgain

BY_SEVERITY = [each.exit_code for each in (StorageError, DeviceError, ArtifactError, RecipeError, TryAgain)]


class Result(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """The run can start, but may be slow or end early."""
    PROBLEM = "problem"
    """The run would be refused, or would fail."""


@dataclass(frozen=True)
class Finding:
    result: Result
    seen: str
    next: str = ""
    """Next step after a warning or a problem: a command, if one command does it."""
    exit_code: int = 0
    """Exit code of a problem; 0 otherwise."""
    compared: str | float | None = None
    """What has to be equal, or nearly, on all nodes."""
    check: str = ""


def ok(seen: str) -> Finding:
    return Finding(Result.OK, seen)


def warning(seen: str, next_step: str) -> Finding:
    return Finding(Result.WARNING, seen, next_step)


def problem(error: MillraceError, next_step: str) -> Finding:
    return Finding(Result.PROBLEM, str(error), next_step, error.exit_code)


def run_check(check: str, find: Callable[[], Finding], next_step: str) -> Finding:
    """Run one check, whose error becomes a problem with `next_step`, so that it does not stop the other checks."""
    try:
        found = find()
    except MillraceError as error:
        found = problem(error, next_step)
    except OSError as error:
        found = problem(StorageError(str(error)), next_step)
    return replace(found, check=check)


def merge_nodes(found: dict[str, list[Finding]]) -> list[Finding]:
    """Merge the findings of all nodes: all results `ok` of one check become one line, with the first node's facts."""
    if len(found) == 1:
        return next(iter(found.values()))
    merged = []
    for check in dict.fromkeys(finding.check for findings in found.values() for finding in findings):
        of_check = [(node, each) for node, findings in found.items() for each in findings if each.check == check]
        good = [each for _, each in of_check if each.result is Result.OK]
        if good:
            merged.append(replace(good[0], seen=f"{len(good)} nodes, the first: {good[0].seen}"))
        merged += [replace(each, seen=f"{node}: {each.seen}") for node, each in of_check if each not in good]
    return merged


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of the most serious problem; 0 if there is none."""
    codes = {finding.exit_code for finding in findings}
    return next((code for code in BY_SEVERITY if code in codes), max(codes, default=0))


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
    can_start = (
        "Do the steps after `next:`, then run doctor again." if Result.PROBLEM in results else "The run can start."
    )
    return f"problems: {results.count(Result.PROBLEM)}, warnings: {results.count(Result.WARNING)}. {can_start}"
