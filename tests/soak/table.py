"""Writes what a soak has seen as Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.machine import describe_machine
from tests.soak.cycle import CycleResult


def describe_cycle(result: CycleResult) -> str:
    """Return one line about a cycle."""
    cycle = result.cycle
    faults = ", ".join(f"{each.fault.stage}: {each.fault.kind} ({each.target})" for each in result.injected)
    codes = " ".join(f"{end.stage}:{end.exit_code}" for end in result.ends)
    found = f"{len(result.findings)} FINDINGS" if result.findings else "audit passed"
    return (
        f"cycle {cycle.number}: {result.seconds:.0f} s, {cycle.launch}, {cycle.max_steps} steps, {found}; {codes}; "
        f"{faults or 'no fault'}"
    )


def make_table(seed: int, results: Sequence[CycleResult]) -> str:
    """Return the table of faults with their outcomes and times of recovery, and a list of what was audited."""
    injected = [each for result in results for each in result.injected]
    rows = ["| fault | count | outcomes | recovery, median | slowest |", "|---|---|---|---|---|"]
    for kind in sorted({each.fault.kind for each in injected}):
        chosen = [each for each in injected if each.fault.kind == kind]
        seconds = [each.recovery_seconds for each in chosen if each.recovery_seconds is not None]
        median, slowest = (f"{statistics.median(seconds):.0f} s", f"{max(seconds):.0f} s") if seconds else ("", "")
        rows.append(f"| {kind} | {len(chosen)} | {_count(each.outcome for each in chosen)} | {median} | {slowest} |")
    return "\n".join([*rows, "", *_describe_audit(seed, results)])


def _describe_audit(seed: int, results: Sequence[CycleResult]) -> list[str]:
    ends = [end for result in results for end in result.ends]
    findings = [finding for result in results for finding in result.findings]
    minutes = sum(result.seconds for result in results) / 60
    passed = sum(not result.findings for result in results)
    return [
        f"Machine: {describe_machine()}. Seed {seed}.",
        "",
        f"- {len(results)} pipelines in {minutes:.0f} minutes, {sum(len(r.injected) for r in results)} faults; "
        f"{passed} passed the audit, with {len(findings)} findings.",
        f"- {len(ends)} starts of commands: exit codes {_count(str(end.exit_code) for end in ends)}.",
    ]


def _count(outcomes: Iterable[str]) -> str:
    counted = Counter(outcomes)
    return ", ".join(f"{outcome} {count}" for outcome, count in counted.most_common())
