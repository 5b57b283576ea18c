"""Measures the tokens per second of training steps, side by side with those of another checkout.

    python -m benchmarks.trainer.step_rows --root ROOT --before CHECKOUT [--recipe FILE] [--rounds 5] [--steps 200]
        [--workers 1 2]

The tokenizer and the compiler run first where ROOT lacks their artifacts, so the caches are warm. A round is one
command of each checkout for each number of workers, with a run folder of its own, and the commands of a round run in
turn, so that other load on the machine meets all of them.

The seconds of the steps are those of the wall: from the end of step STEPS_LEFT_OUT to the end of the last one, with all
that lies between two steps. No checkpoint and no evaluation is among them. Each median of the rounds is printed beside
that of the other checkout. Both use the Python that runs the benchmark.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.rounds import measure_rounds
from benchmarks.trainer.start_rows import BEFORE, NOW, make_artifacts, name_checkouts, new_root
from services.common.recipe.derived import tokens_per_step
from services.common.recipe.file import load_recipe
from services.trainer.metrics.records import read_metrics

STEPS_LEFT_OUT = 10
"""Number of steps at the start of a run that are not measured: they load graphs and fill caches."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.step_rows")
    parser.add_argument("--root", type=Path, required=True, help="folder of the recipe's corpus and compile caches")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/tiny-cpu.toml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="measured steps of a run")
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2), help="numbers of workers")
    parser.add_argument("--before", type=Path, help="another checkout of the project, measured in the same rounds")
    arguments = parser.parse_args()
    recipe, root = arguments.recipe.absolute(), arguments.root.absolute()
    checkouts = name_checkouts(arguments.before)
    for workers in arguments.workers:
        make_artifacts(recipe, root, checkouts.values(), *_options(workers, arguments.steps))
    rows = {
        (f"{workers} {name}"): (workers, folder) for workers in arguments.workers for name, folder in checkouts.items()
    }
    machine = describe_machine()
    rates = measure_rounds(
        [*rows], arguments.rounds, lambda row: measure_rate(recipe, root, *rows[row], arguments.steps)
    )
    print(f"{machine}, {arguments.recipe}, tokens/s in wall time\n{describe_rates(rates)}")
    return 0


def describe_rates(rates: Mapping[str, Sequence[float]]) -> str:
    """Format a table of medians with their samples, and with their ratios to the medians of the other checkout."""
    lines = []
    medians = {row: statistics.median(each) for row, each in rates.items()}
    for row, each in rates.items():
        workers, _, checkout = row.partition(" ")
        earlier = medians.get(f"{workers} {BEFORE}") if checkout == NOW else None
        ratio = f"  {medians[row] / earlier:.3f} times before" if earlier else ""
        label = f"{workers} worker{'s' if workers != '1' else ''} {checkout}"
        lines.append(f"{label:<18} {medians[row]:9,.0f}   of {' '.join(f'{rate:,.0f}' for rate in each)}{ratio}")
    return "\n".join(lines)


def measure_rate(recipe: Path, root: Path, workers: int, checkout: Path, steps: int) -> float:
    """Train a new run with the program of `checkout`, and return the tokens per second of its measured steps."""
    options = ["--recipe", str(recipe), "--launch=inline", *_options(workers, steps)]
    with new_root(root) as folder:
        command = [sys.executable, "-m", "services.trainer", *options, "--root", str(folder)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{checkout}: the trainer ended with {done.returncode}:\n{done.stderr}")
        [run] = folder.glob("run/*/")
        ended_at = {record["step"]: record["time"] for record in read_metrics(run)}
    seconds = ended_at[STEPS_LEFT_OUT + steps] - ended_at[STEPS_LEFT_OUT]
    return steps * tokens_per_step(load_recipe(recipe, {})) / seconds


def _options(workers: int, steps: int) -> list[str]:
    last = STEPS_LEFT_OUT + steps
    return [
        f"--parallel.data_parallel_size={workers}",
        f"--train.max_steps={last}",
        f"--train.evaluation_interval_steps={last}",
        f"--checkpoint.interval_steps={last}",
    ]


if __name__ == "__main__":
    sys.exit(main())
