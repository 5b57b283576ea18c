"""Runs pipelines in a loop on this machine while faults are injected, and audits what they leave.

    python -m tests.soak --minutes 30
    python -m tests.soak --seed 17 --cycle 12     this cycle alone

Each cycle is a pipeline in a root of its own on a small ext4 file system. Its faults follow from the seed and the
cycle's number (`tests.soak.plan`). A stage whose command is killed, or ends with 5, 75 or 130, is started again, as a
scheduler does. The results must equal those of one undisturbed run of the same recipe. A soak needs Linux, root,
e2fsprogs and util-linux. It ends with a table in Markdown, and with exit code 1 where the audit found something.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.machine import describe_machine
from services.common.errors import DeviceError
from services.common.process.command_line import make_app, run_app
from services.common.process.entry_point import run_program
from services.common.testing.seeds import draw_seed
from tests.soak.cycle import CycleResult, soaking
from tests.soak.plan import plan_cycle

TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
MAX_FINDINGS = 20
app = make_app()


def main(argv: list[str]) -> int:
    return run_app(app, argv, "tests.soak")


@app.command()
def soak(
    minutes: Annotated[float, Option(help="start no cycle after so many minutes")] = 30.0,
    seed: Annotated[int | None, Option(help="the seed of a soak that is to be repeated")] = None,
    cycle: Annotated[int | None, Option(help="run the cycle with this number alone")] = None,
    folder: Annotated[Path, Option(help="folder for disks, logs and the undisturbed run")] = Path("/tmp/millrace-soak"),
) -> int:
    """Run pipelines under faults, and audit them."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise DeviceError(f"no {', '.join(missing)} on PATH. Debian: apt-get install e2fsprogs mount util-linux")
    if os.getuid() != 0:
        raise DeviceError(f"a soak mounts file systems, for which it needs root; this is user {os.getuid()}")
    seed = draw_seed() if seed is None else seed
    results = list[CycleResult]()
    with soaking(folder.absolute()) as running:
        print(f"seed {seed}: repeat a cycle with --seed {seed} --cycle NUMBER; logs are in {running.logs}", flush=True)
        deadline, number = time.monotonic() + 60 * minutes, cycle or 0
        while sum(len(result.findings) for result in results) < MAX_FINDINGS:
            results.append(running.run_cycle(plan_cycle(seed, number)))
            print(describe_cycle(results[-1]), flush=True)
            if cycle is not None or time.monotonic() > deadline:
                break
            number += 1
    print(f"\n{make_table(seed, results)}\n", flush=True)
    findings = [finding for result in results for finding in result.findings]
    for finding in findings:
        print(f"FOUND {finding}", file=sys.stderr)
    return 1 if findings else 0


def describe_cycle(result: CycleResult) -> str:
    """Return one line about a cycle."""
    cycle = result.cycle
    faults = [f"{run.stage}: {each.fault.kind} ({each.target})" for run in result.runs for each in run.injected]
    codes = " ".join(f"{run.stage}:{exit_code}" for run in result.runs for exit_code in run.exit_codes)
    found = f"{len(result.findings)} FINDINGS" if result.findings else "audit passed"
    return (
        f"cycle {cycle.number}: {result.seconds:.0f} s, {cycle.launch}, {found}; {codes}; "
        f"{', '.join(faults) or 'no fault'}"
    )


def make_table(seed: int, results: Sequence[CycleResult]) -> str:
    """Return the table of faults with their outcomes and times of recovery, and what came of all pipelines."""
    runs = [run for result in results for run in result.runs]
    injected = [each for run in runs for each in run.injected]
    exit_codes = [str(exit_code) for run in runs for exit_code in run.exit_codes]
    rows = ["| fault | count | outcomes | recovery, median | slowest |", "|---|---|---|---|---|"]
    for kind in sorted({each.fault.kind for each in injected}):
        chosen = [each for each in injected if each.fault.kind == kind]
        seconds = [each.recovery_seconds for each in chosen if each.recovery_seconds is not None]
        median, slowest = (f"{statistics.median(seconds):.0f} s", f"{max(seconds):.0f} s") if seconds else ("", "")
        rows.append(f"| {kind} | {len(chosen)} | {_count(each.outcome for each in chosen)} | {median} | {slowest} |")
    return "\n".join(
        [
            *rows,
            "",
            f"Machine: {describe_machine()}. Seed {seed}.",
            "",
            f"- {len(results)} pipelines in {sum(result.seconds for result in results) / 60:.0f} minutes, "
            f"{len(injected)} faults; {sum(not result.findings for result in results)} passed the audit, with "
            f"{sum(len(result.findings) for result in results)} findings.",
            f"- {len(exit_codes)} starts of commands: exit codes {_count(exit_codes)}.",
        ]
    )


def _count(outcomes: Iterable[str]) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in Counter(outcomes).most_common())


if __name__ == "__main__":
    run_program(main)
