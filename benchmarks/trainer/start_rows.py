"""Measures the times of a run's start, of a restart after a killed worker, and of a checkpoint's hand-over.

    python -m benchmarks.trainer.start_rows --root ROOT [--recipe FILE] [--rounds 3] [--launch ray inline joined]
        [--before CHECKOUT]

The tokenizer and the compiler run first where ROOT lacks their artifacts, so the caches are warm. A round is one
command of each launcher with a run folder of its own, which is stopped once all times are measured; `joined` is `ray`
on a cluster that runs already, of one node:

first step     seconds from the command's start to the end of the first step
restart        seconds from kill -9 of the last worker to the end of the first step of its replacements
node restart   the same for the process of the node's agent, which only Ray has
stall          seconds that training waits for a checkpoint: the median of the round's checkpoints

With --before, a round has the commands of another checkout too, such as a git worktree of an earlier commit, and each
median is printed beside that of the other checkout. Both use the Python that runs the benchmark.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.machine import describe_machine
from benchmarks.rounds import measure_rounds
from services.common.launch.launcher import INLINE, LAUNCHERS, RAY
from services.common.recipe.file import load_recipe
from services.trainer.metrics.records import read_metrics

LIMIT_SECONDS = 300.0
POLL_SECONDS = 0.1
CHECKPOINT_STEPS = 20

T = TypeVar("T")


JOINED = "joined"
LAUNCHES = (*LAUNCHERS, JOINED)
REPOSITORY = Path(__file__).resolve().parents[2]
NOW, BEFORE = "now", "before"


@dataclass(frozen=True)
class MeasuredStart:
    """Times of one round, in seconds."""

    first_step: float
    restart: float
    node_restart: float | None
    stall: float


ROWS: dict[str, Callable[[MeasuredStart], float | None]] = {
    "first step": lambda times: times.first_step,
    "restart": lambda times: times.restart,
    "node restart": lambda times: times.node_restart,
    "stall": lambda times: times.stall,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.start_rows")
    parser.add_argument("--root", type=Path, required=True, help="folder of the recipe's corpus and compile cache")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/tiny-cpu.toml"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--launch", choices=LAUNCHES, nargs="+", default=LAUNCHES)
    parser.add_argument("--before", type=Path, help="another checkout of the project, measured in the same rounds")
    arguments = parser.parse_args()
    machine = describe_machine()
    table = make_table(arguments.recipe, arguments.root, arguments.rounds, arguments.launch, arguments.before)
    print(f"{machine}, {arguments.recipe}, warm caches\n{table}")
    return 0


def make_table(
    recipe: Path, root: Path, rounds: int, launches: Sequence[str] = LAUNCHES, before: Path | None = None
) -> str:
    """Make the recipe's corpus and compile cache in `root`, then measure and format the rows of the launchers."""
    recipe, root = recipe.absolute(), root.absolute()
    checkouts = name_checkouts(before)
    make_artifacts(recipe, root, checkouts.values())
    commands = {f"{launch} {name}": (launch, folder) for launch in launches for name, folder in checkouts.items()}
    return describe_starts(measure_rounds([*commands], rounds, lambda row: measure_start(recipe, root, *commands[row])))


def name_checkouts(before: Path | None) -> dict[str, Path]:
    """Return the folders of this checkout and of the other one, if there is one."""
    return {NOW: REPOSITORY} | ({BEFORE: before.absolute()} if before else {})


def make_artifacts(recipe: Path, root: Path, checkouts: Iterable[Path], *overrides: str) -> None:
    """Make the corpus and the compile cache of the recipe in `root` with each checkout, where it lacks them."""
    for checkout in checkouts:
        for stage in ("tokenizer", "compiler"):
            options = ["--recipe", str(recipe), "--root", str(root), *overrides]
            subprocess.run([sys.executable, "-m", f"services.{stage}", *options], check=True, cwd=checkout)


@contextmanager
def new_root(root: Path) -> Iterator[Path]:
    """Make a root for the block that has the corpus and the compile cache of `root`, and no run."""
    with tempfile.TemporaryDirectory() as name:
        for collection in ("corpus", "compile_cache"):
            (Path(name) / collection).symlink_to(root / collection)
        yield Path(name)


def describe_starts(measured: dict[str, list[MeasuredStart]]) -> str:
    """Format a table of medians with their samples, and with their ratios to the medians of the other checkout."""
    lines = []
    for name, read in ROWS.items():
        samples = {row: [seconds for each in starts if (seconds := read(each))] for row, starts in measured.items()}
        medians = {row: statistics.median(seconds) for row, seconds in samples.items() if seconds}
        for row, median in medians.items():
            launch, _, checkout = row.partition(" ")
            earlier = medians.get(f"{launch} {BEFORE}") if checkout == NOW else None
            ratio = f"  {median / earlier:.2f} times before" if earlier else ""
            shown = " ".join(f"{seconds:.2f}" for seconds in samples[row])
            lines.append(f"{name:<12} {row:<14} {median:6.2f} s   of {shown}{ratio}")
    return "\n".join(lines)


def measure_start(recipe: Path, root: Path, launch: str, checkout: Path) -> MeasuredStart:
    """Train a new run with the program of `checkout`, kill its last worker, then its node's agent, and stop it."""
    log = f"rank-{load_recipe(recipe, {}).parallel.num_workers - 1:05d}.log"

    def restart(victim: psutil.Process) -> float:
        killed_at = time.time()
        victim.kill()
        return _wait_for(command, lambda: _find_first_step(folder, killed_at)) - killed_at

    with (
        new_root(root) as folder,
        _running_ray(launch, checkout) as address,
        _running(recipe, folder, launch, address, checkout) as command,
    ):
        started_at = time.time()
        first = _wait_for(command, lambda: _find_first_step(folder, started_at))
        _wait_for(command, lambda: len(_stalls(folder)) >= 2)
        again = restart(_find_process(lambda each: any(Path(file.path).name == log for file in each.open_files())))
        anew = None if launch == INLINE else restart(_find_process(_is_agent))
        return MeasuredStart(first - started_at, again, anew, statistics.median(_stalls(folder)))


@contextmanager
def _running_ray(launch: str, checkout: Path) -> Iterator[str]:
    """Run Ray for the block where the command is to join it, and yield its address; empty for a Ray of its own."""
    if launch != JOINED:
        yield ""
        return
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - the other launchers are measured without Ray, too

    with chdir(checkout):  # from which Ray's processes import
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": os.cpu_count()})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def _running(
    recipe: Path, root: Path, launch: str, ray_address: str, checkout: Path
) -> Iterator[subprocess.Popen[bytes]]:
    options = ("--recipe", str(recipe), "--root", str(root), "--launch", INLINE if launch == INLINE else RAY)
    log = root / "command.log"
    with log.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "services.trainer", *options, f"--checkpoint.interval_steps={CHECKPOINT_STEPS}"],
            stdout=output,
            stderr=output,
            cwd=checkout,
            env={**os.environ, "RAY_ADDRESS": ray_address},
        )
    try:
        yield command
    except TimeoutError as error:
        error.add_note(log.read_text(errors="replace"))
        raise
    finally:
        command.send_signal(signal.SIGTERM)
        command.wait()


def _wait_for(command: subprocess.Popen[bytes], find: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := find()):
        if time.monotonic() > deadline or command.poll() is not None:
            raise TimeoutError(f"the command ended, or took more than {LIMIT_SECONDS:.0f} s, before it was measured:")
        time.sleep(POLL_SECONDS)
    return found


def _records(root: Path) -> list[dict[str, Any]]:
    return [record for folder in root.glob("run/*/") for record in read_metrics(folder)]


def _find_first_step(root: Path, after: float) -> float | None:
    """Return the time at which workers ended their first step, if that is later than `after`."""
    firsts = [record["time"] for record in _records(root) if record["is_first_of_process"]]
    return next((ended_at for ended_at in firsts if ended_at > after), None)


def _stalls(root: Path) -> list[float]:
    found = (record.get("checkpoint_stall_seconds") for record in _records(root))
    return [seconds for seconds in found if seconds is not None]


def _find_process(is_wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
    """Find a process of the command, or of the Ray that it has joined: both are children of this one."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if is_wanted(process):
                return process
    raise ProcessLookupError("a process that should be killed does not run")


def _is_agent(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "launch.node_process" in command or "launch.agent_process" in command


if __name__ == "__main__":
    sys.exit(main())
