"""Runs pipelines in a loop on this machine while faults are injected, and audits what they leave.

    python -m tests.soak --minutes 30
    python -m tests.soak --seed 17 --cycle 12     this cycle alone

Each cycle is a pipeline in a root of its own on a small ext4 file system. Its faults follow from the seed and the
cycle's number (`tests.soak.plan`). A stage whose command is killed, or ends with 5, 75 or 130, is started again, as a
scheduler does. The results must equal those of one undisturbed run of the same recipe. A soak needs Linux, root,
e2fsprogs and util-linux. It ends with a table in Markdown, and with exit code 1 where the audit
found something.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from services.common.errors import DeviceError
from services.common.process.entry_point import run_program
from services.common.testing.seeds import draw_seed
from tests.soak.cycle import CycleResult, soaking
from tests.soak.plan import plan_cycle
from tests.soak.table import describe_cycle, make_table

TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
MOST_FINDINGS = 20


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    _require_tools()
    seed = draw_seed() if arguments.seed is None else arguments.seed
    results = list[CycleResult]()
    with soaking(arguments.folder.absolute()) as soak:
        print(f"seed {seed}: repeat a cycle with --seed {seed} --cycle NUMBER; logs are in {soak.logs}", flush=True)
        deadline, number = time.monotonic() + 60 * arguments.minutes, arguments.cycle or 0
        while sum(len(result.findings) for result in results) < MOST_FINDINGS:
            results.append(soak.run_cycle(plan_cycle(seed, number)))
            print(describe_cycle(results[-1]), flush=True)
            if arguments.cycle is not None or time.monotonic() > deadline:
                break
            number += 1
    print(f"\n{make_table(seed, results)}\n", flush=True)
    findings = [finding for result in results for finding in result.findings]
    for finding in findings:
        print(f"FOUND {finding}", file=sys.stderr)
    return 1 if findings else 0


def _require_tools() -> None:
    """Raise `DeviceError` where this machine cannot inject the faults."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or os.getuid() != 0 or missing:
        raise DeviceError(
            f"a soak mounts file systems: it needs Linux and root (this is user {os.getuid()} on "
            f"{sys.platform}), and these programs, of which {', '.join(missing) or 'none'} is missing: "
            f"{', '.join(TOOLS)}. On Debian: `apt-get install e2fsprogs mount util-linux`."
        )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Run pipelines under faults, and audit them."
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="begin no cycle after so many minutes (default: 30)"
    )
    parser.add_argument("--seed", type=int, help="the seed of a soak that is to be repeated")
    parser.add_argument("--cycle", type=int, help="run the cycle with this number alone")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/millrace-soak"), help="folder for disks, logs and undisturbed runs"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
