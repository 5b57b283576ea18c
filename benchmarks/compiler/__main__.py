"""What compiling Neuron's graphs as tasks gains, and what a second command costs. neuronx-cc is a stand-in that sleeps.

    python -m benchmarks.compiler [--graphs 64] [--seconds 1.5] [--launch ray]

one, two   seconds from the first compilation's start to that of the last, with so many tasks at a time; in brackets,
           those of the whole command: imports, Ray's start, trace, publishing and verifying
again      seconds of a second command for an unchanged recipe
first step seconds to the end of a CPU worker's first step under --recipe, with an empty compile cache and a filled one
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from services.common.testing.recipes import write_recipe
from services.compiler.tests import neuronx_cc
from services.compiler.tests.neuron_stage import write_graph

GRAPH_BYTES = 100_000


class Seconds(NamedTuple):
    tasks: float
    command: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiler")
    parser.add_argument("--graphs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.5, help="that the stand-in sleeps for a graph")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/tiny-cpu.toml"))
    parser.add_argument("--launch", choices=("ray", "inline"), default="ray")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {arguments.launch}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(arguments.graphs):
            write_graph(folder / "graphs", f"{number:04d}", GRAPH_BYTES)
        neuronx_cc.install(folder / "bin")
        neuronx_cc.behave(folder / "bin", seconds=arguments.seconds)
        one = run_stage(folder, 1, arguments.launch)
        two = run_stage(folder, 2, arguments.launch)
        begun = len(neuronx_cc.read_calls(folder / "bin"))
        again = run_stage(folder, 2, arguments.launch)
        assert len(neuronx_cc.read_calls(folder / "bin")) == begun == 2 * arguments.graphs
    print(f"one     {arguments.graphs} graphs of {arguments.seconds:g} s: {one.tasks:.1f} s ({one.command:.1f} s)")
    print(f"two     {two.tasks:.1f} s ({two.command:.1f} s): {one.tasks / two.tasks:.2f}x")
    print(f"again   {again.command:.1f} s, no graph compiled")
    with tempfile.TemporaryDirectory() as cache:
        cold, *warm = (take_first_step(arguments.recipe, cache) for _ in range(4))
    median = statistics.median(warm)
    print(f"first step   cache empty {cold:.1f} s, filled {median:.1f} s: {cold / median:.1f}x")
    return 0


def take_first_step(recipe: Path, cache: str) -> float:
    command = [sys.executable, "-m", "benchmarks.compiler.first_step", str(recipe), cache]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def run_stage(folder: Path, num_workers: int, launch: str) -> Seconds:
    settings = {"compile__num_workers": num_workers, "compile__task_cpus": 1, "compile__task_memory_gib": 0.25}
    recipe = write_recipe(folder, **settings)
    command = [sys.executable, "-m", "services.compiler.tests.neuron_stage", str(recipe)]
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RAY_ADDRESS": ""}
    started, first = time.perf_counter(), len(neuronx_cc.read_calls(folder / "bin"))
    subprocess.run(
        [*command, str(folder / f"fsx-{num_workers}"), str(folder / "graphs"), launch],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    command_seconds = time.perf_counter() - started
    begun_at = [float(call["begun_at"]) for call in neuronx_cc.read_calls(folder / "bin")[first:]]
    return Seconds(max(begun_at) - min(begun_at) if begun_at else 0.0, command_seconds)


if __name__ == "__main__":
    sys.exit(main())
