"""Measures how the start of a training grows with the shards of its corpus.

    python -m benchmarks.trainer.corpus_start [--shards 200000] [--rounds 3]

A round trains one step of two workers on a corpus of one shard, and one step on a corpus of --shards shards:

first step       seconds from the command's start to the end of the first step
CPU              seconds of CPU until then, of the command and all of its processes
command, worker  largest memory of the command's process, and of a worker, in MB (VmHWM)
opened           files of the corpus that were opened by any process, the manifest not counted
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.machine import describe_machine
from benchmarks.rounds import measure_rounds
from benchmarks.trainer.linked_corpus import publish_linked_corpus
from services.common.artifacts.manifest import MANIFEST
from services.common.testing import recipes
from services.common.testing.file_opens import noticing_opens
from services.trainer.metrics.records import METRICS_FILE, read_metrics
from services.trainer.tests.builders import make_corpus

SHARDS = 200_000
POLL_SECONDS = 0.05
SETTINGS = {
    "corpus__rows_per_shard": 8,
    "parallel__data_parallel_size": 2,
    "compile__enabled": False,
    "train__max_steps": 1,
    "train__evaluation_tokens": 0,
}


@dataclass(frozen=True)
class Start:
    """Measurements of one start."""

    first_step_seconds: float
    cpu_seconds: float
    command_megabytes: float
    worker_megabytes: float
    opened: float


ROWS: dict[str, Callable[[Start], float]] = {
    "first step, s": lambda start: start.first_step_seconds,
    "CPU, s": lambda start: start.cpu_seconds,
    "command, MB": lambda start: start.command_megabytes,
    "worker, MB": lambda start: start.worker_megabytes,
    "opened": lambda start: start.opened,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.corpus_start")
    parser.add_argument("--shards", type=int, default=SHARDS, help=f"shards of the large corpus (default: {SHARDS:,})")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians are printed (default: 3)")
    arguments = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe_file = recipes.write_recipe(folder, **SETTINGS)
        recipe = recipes.load_with(recipe_file)
        corpora = {"1": folder / "1", f"{arguments.shards:,}": folder / "many"}
        with_vocabulary = make_corpus(folder / "vocabulary", recipe)
        for shards, root in corpora.items():
            publish_linked_corpus(root, recipe, int(shards.replace(",", "")), with_vocabulary)
        measured = measure_rounds(
            [*corpora], arguments.rounds, lambda shards: measure_start(recipe_file, corpora[shards])
        )
    print(f"{machine}, {arguments.rounds} rounds, medians\n\n{make_table(measured)}")
    return 0


def make_table(measured: dict[str, list[Start]]) -> str:
    """Format the medians of each corpus, and what the larger one costs more."""
    lines = [f"| shards | {' | '.join(measured)} | more |", "|---|---|---|---|"]
    for row, read in ROWS.items():
        one, many = (statistics.median(map(read, starts)) for starts in measured.values())
        lines.append(f"| {row} | {one:,.2f} | {many:,.2f} | {many - one:,.2f} |")
    return "\n".join(lines)


def measure_start(recipe: Path, root: Path) -> Start:
    """Train a new run of one step below `root`."""
    [corpus] = root.glob("corpus/*/*/")
    with tempfile.TemporaryDirectory() as name, noticing_opens(corpus) as opens:
        folder = Path(name)
        (folder / "corpus").symlink_to(root / "corpus")
        started_at = time.time()
        command = subprocess.Popen(
            [sys.executable, "-m", "services.trainer", "--recipe", recipe, "--root", folder, "--launch", "inline"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "RAY_ADDRESS": ""},
        )
        cpu_seconds, peaks = _follow(command, folder)
        [run] = folder.glob("run/*/")
        [step] = read_metrics(run)
        return Start(
            first_step_seconds=step["time"] - started_at,
            cpu_seconds=cpu_seconds,
            command_megabytes=peaks["command"] / 1e6,
            worker_megabytes=peaks["worker"] / 1e6,
            opened=len({path for path in opens.paths if path.name != MANIFEST}),
        )


def _follow(command: subprocess.Popen[bytes], root: Path) -> tuple[float, dict[str, float]]:
    """Wait for the command's end. Return the CPU seconds of its processes until its first step, and the largest memory
    of each kind of these processes.
    """
    peaks, cpu_seconds = {"command": 0.0, "worker": 0.0}, dict[int, float]()
    while command.poll() is None:
        is_starting = not any(root.glob(f"run/*/{METRICS_FILE}"))
        with suppress(psutil.Error):
            for process in [(parent := psutil.Process(command.pid)), *parent.children(recursive=True)]:
                with suppress(psutil.Error, OSError):
                    kind = "worker" if _is_worker(process) else "command"
                    peaks[kind] = max(peaks[kind], _peak_bytes(process.pid))
                    if is_starting:
                        cpu_seconds[process.pid] = sum(process.cpu_times()[:2])
        time.sleep(POLL_SECONDS)
    if command.returncode:
        raise RuntimeError(f"the command ended with {command.returncode}")
    return sum(cpu_seconds.values()), peaks


def _is_worker(process: psutil.Process) -> bool:
    return any(Path(file.path).name.startswith("rank-") for file in process.open_files())


def _peak_bytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(
        (float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0.0
    )  # none: it has ended


if __name__ == "__main__":
    sys.exit(main())
