"""Measures the costs of split models, exact sums and checkpoints in one run.

    python -m benchmarks.parallel [--rounds 5] [--only steps,sums,stall]

steps   tokens/s of two processes with one split model (TP 2), and with a model per process (DP 2), on the same batch
sums    seconds of a sum of 100 MB over four processes, exact and fast
stall   seconds that one worker's training waits for a checkpoint of 300 MB of state

Rows take turns in every round, so that other load on the machine meets all of them. A number is the median of the
rounds; the raw seconds go to --output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.parallel import work
from services.common.artifacts.lease import hold_lease
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import load_with, write_recipe
from services.trainer.loop import train
from services.trainer.metrics.records import read_metrics
from services.trainer.tests.builders import make_corpus, make_job

MODEL = {
    "model__hidden_size": 512,
    "model__intermediate_size": 1376,
    "model__num_hidden_layers": 4,
    "model__num_attention_heads": 8,
    "model__num_key_value_heads": 8,
    "model__vocab_size": 4096,
    "tokenizer__train__vocab_size": 4096,
    "corpus__sequence_length": 512,
    "batch__micro_batch_size": 1,
    "batch__global_batch_size": 4,
    "batch__loss_chunk_tokens": 512,
    "compile__enabled": False,
}
"""Recipe values of a model with 17 million parameters."""
STALL = {
    **MODEL,
    "model__hidden_size": 768,
    "model__intermediate_size": 2560,
    "model__num_hidden_layers": 3,
    "model__vocab_size": 512,
    "tokenizer__train__vocab_size": 512,
    "corpus__sequence_length": 16,
}
"""Recipe values of a model with 26 million parameters, whose weights and moments have 300 MB."""
STEPS_BETWEEN = 10
"""Number of steps between two checkpoints: as many as fit into the writing of one."""
SUM_ELEMENTS = 25_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(ROWS), help="rows to run (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="file for the raw seconds, as JSON")
    arguments = parser.parse_args()
    print(describe_machine())
    raw: dict[str, Any] = {}
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            raw[name] = ROWS[name](Path(folder), arguments.rounds)
    if arguments.output:
        arguments.output.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return 0


def measure_steps(folder: Path, rounds: int) -> work.Seconds:
    two = {
        "DP 2": make_recipe(folder, MODEL, parallel__data_parallel_size="2"),
        "TP 2": make_recipe(folder, MODEL, parallel__tensor_parallel_size="2"),
    }
    seconds = _run(work.measure_steps, work.Measurement(folder, two, rounds), num_workers=2)
    recipe = two["DP 2"]
    tokens = recipe.batch.global_batch_size * recipe.corpus.sequence_length
    rates = {name: tokens / statistics.median(each) for name, each in seconds.items()}
    print(
        f"steps   DP 2 {rates['DP 2']:,.0f} tokens/s, TP 2 {rates['TP 2']:,.0f}: {rates['TP 2'] / rates['DP 2']:.2f}x"
    )
    return seconds


def measure_sums(folder: Path, rounds: int) -> work.Seconds:
    measurement = work.Measurement(folder, {}, rounds, SUM_ELEMENTS)
    seconds = _run(work.measure_sums, measurement, num_workers=4)
    exact, fast = (statistics.median(seconds[reduction]) for reduction in ("exact", "fast"))
    print(f"sums    fast {fast:.3f} s, exact {exact:.3f} s: {exact / fast:.2f}x the time")
    return seconds


def measure_stall(folder: Path, rounds: int) -> work.Seconds:
    recipe = make_recipe(
        folder, STALL, train__max_steps=f"{STEPS_BETWEEN * rounds}", checkpoint__interval_steps=f"{STEPS_BETWEEN}"
    )
    with hold_lease(folder / "run.lock") as held:
        job = make_job(folder, recipe, make_corpus(folder, recipe), held.lease)
        train(job, WorkerEnvironment(rank=0, world_size=1, launch="inline"))
    records = read_metrics(job.run_folder).lines
    stalls = [record["checkpoint_stall_seconds"] for record in records if "checkpoint_stall_seconds" in record]
    megabytes, later = recipe.model.num_parameters * 12 / 1e6, statistics.median(stalls[1:] or stalls)
    print(f"stall   {megabytes:,.0f} MB: {stalls[0]:.3f} s for the first checkpoint, {later:.3f} s for later ones")
    return {"stall": stalls}


ROWS: dict[str, Callable[[Path, int], work.Seconds]] = {
    "steps": measure_steps,
    "sums": measure_sums,
    "stall": measure_stall,
}


def make_recipe(folder: Path, model: dict[str, Any], **overrides: str) -> Recipe:
    return load_with(write_recipe(folder, **model), **overrides)


def _run(function: Callable[..., None], measurement: work.Measurement, num_workers: int) -> work.Seconds:
    inline.run_workers(function, measurement, WorkerGroupSpec(num_workers, 1, num_workers, measurement.folder))
    seconds: work.Seconds = json.loads((measurement.folder / "seconds.json").read_text(encoding="utf-8"))
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
