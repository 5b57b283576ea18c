"""What `doctor` finds, one line for each check, and the table of them."""

from __future__ import annotations

import enum
import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.errors import (
    EXIT_BUG,
    ArtifactError,
    DeviceError,
    Interrupted,
    MillraceError,
    RecipeError,
    StorageError,
    TryAgain,
)
from services.common.hardware.instance_types import GIB, MIB
from services.common.process.entry_point import explain_os_error

logger = logging.getLogger(__name__)

MOST_SERIOUS_FIRST = (
    *(StorageError.exit_code, DeviceError.exit_code, ArtifactError.exit_code, RecipeError.exit_code),
    *(TryAgain.exit_code, EXIT_BUG),
)
NEXT = "next: "
_NARROWEST = 40


class Result(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """The run can begin, and may be slow, end early or be lost later."""
    PROBLEM = "problem"
    """The run would be refused, or would fail."""


@dataclass(frozen=True)
class Finding:
    check: str
    result: Result
    seen: str
    next: str = ""
    """What to do where something is wrong: a command where one does it."""
    exit_code: int = 0
    """Of a problem."""


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Result.OK, seen)


def warning(check: str, seen: str, next_step: str) -> Finding:
    return Finding(check, Result.WARNING, seen, next_step)


def problem(check: str, error: MillraceError, next_step: str) -> Finding:
    # The sentence with the same command would say it twice.
    seen = re.sub(rf"\s*[^.\n]*{re.escape(f'`{next_step}`')}\.?", "", str(error))
    return Finding(check, Result.PROBLEM, seen, next_step, error.exit_code)


Look = Callable[[], Iterable[Finding]]


def look_at(check: str, look: Look, next_step: str) -> list[Finding]:
    """What `look` finds, up to what it fails of, which is a problem: the checks after it are made all the same."""
    found = []
    try:
        for finding in look():
            found.append(finding)  # each by itself: what comes before a failure is kept
    except Interrupted:
        raise
    except MillraceError as error:
        found.append(problem(check, error, next_step))
    except OSError as error:
        found.append(problem(check, explain_os_error(error) or StorageError(str(error)), next_step))
    except Exception as error:  # a bug of ours in one check must not hide what the others find
        logger.debug("%s failed", check, exc_info=True)
        told = f"the check failed of a bug: {type(error).__name__}: {error}"
        found.append(Finding(check, Result.PROBLEM, told, "report it, with this line", EXIT_BUG))
    return found


def merge_nodes(found: dict[str, list[Finding]]) -> list[Finding]:
    """One list from those of the nodes: a check that is ok on all of them is one line, of the first one."""
    if len(found) == 1:
        return next(iter(found.values()))
    merged = []
    for check in dict.fromkeys(finding.check for findings in found.values() for finding in findings):
        of_check = [(node, each) for node, findings in found.items() for each in findings if each.check == check]
        good = [each for _, each in of_check if each.result is Result.OK]
        if good:
            merged.append(ok(check, f"{len(good)} nodes, the first: {good[0].seen}"))
        merged += [
            Finding(check, each.result, f"{node}: {each.seen}", each.next, each.exit_code)
            for node, each in of_check
            if each.result is not Result.OK
        ]
    return merged


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a problem, else that of the most serious kind."""
    codes = {finding.exit_code for finding in findings if finding.result is Result.PROBLEM}
    return next((code for code in MOST_SERIOUS_FIRST if code in codes), max(codes, default=0))


def format_table(findings: Sequence[Finding], width: int | None = None) -> str:
    """Lines are broken to `width` columns where it is given; else a finding's text stays one line as it is."""
    check_width = max(len("check"), *(len(finding.check) for finding in findings))
    result_width = max(len(result) for result in Result)
    margin = " " * (check_width + result_width + 4)
    room = max(_NARROWEST, width - len(margin)) if width else None
    lines = [f"{'check':<{check_width}}  {'result':<{result_width}}  seen"]
    for finding in findings:
        begin = f"{finding.check:<{check_width}}  {finding.result:<{result_width}}  "
        # Commands stay one line: they are to be copied.
        shown = [*_broken(finding.seen, room), *([f"{NEXT}{finding.next}"] if finding.next else [])]
        lines += [f"{begin if number == 0 else margin}{line}".rstrip() for number, line in enumerate(shown)]
    return "\n".join(lines)


def summarize(findings: Sequence[Finding]) -> str:
    problems, warnings = (
        sum(finding.result is result for finding in findings) for result in (Result.PROBLEM, Result.WARNING)
    )
    if problems:
        seen = f"{_count(problems, 'problem')} and {_count(warnings, 'warning')}"
        return f"{seen}: do what `{NEXT.strip()}` says, then ask again"
    return f"the run can begin: no problem and {_count(warnings, 'warning')}"


def show_size(num_bytes: float) -> str:
    """The size in the unit that a person reads it in: MiB, or GiB from one on."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"


def terminal_width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _broken(text: str, room: int | None) -> list[str]:
    lines = text.splitlines() or [""]
    if room is None:
        return lines
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
    ]
