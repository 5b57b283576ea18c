"""Measures what the checks of a corpus's rows cost beside a training step.

    python -m benchmarks.trainer.row_checks [--steps 200] [--rounds 5]

step         CPU milliseconds of a worker's step of `recipes/tiny-cpu.toml`, eager and compiled
checked      CPU microseconds to read a sample as the trainer does, in random order, from the page cache
unchecked    the same without the comparison of each row with its check
share        what the checks of a worker's samples of a step cost, as a share of that step
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.rounds import measure_rounds
from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.corpus_rows import CorpusRows, Row
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.program.mesh import Mesh
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.trainer.data import micro_batches
from services.trainer.mixture import Mixture
from services.trainer.tests.builders import make_corpus, make_program

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
STEPS_LEFT_OUT = 3
STEPS = ("step, eager", "step, compiled")
SAMPLES = 20_000


class UncheckedRows(CorpusRows):
    """Gives the rows of a corpus without a look at their checks."""

    def read(self, split: Split, row: int) -> Row:
        file, length = self.file_of(split, row), self.corpus.sequence_length
        at = row - file.rows.start
        begin, end = file.start_offsets[at : at + 2].tolist()
        return Row(file.tokens[at * length : (at + 1) * length], file.starts[begin:end])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.row_checks")
    parser.add_argument("--steps", type=int, default=200, help="steps of a round (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which medians are printed (default: 5)")
    arguments = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        rows = make_rows(Path(name), arguments.steps)
        measured = measure_rounds([*rows], arguments.rounds, lambda row: rows[row]())
    medians = {row: statistics.median(values) for row, values in measured.items()}
    print(f"{machine}, {arguments.rounds} rounds of {arguments.steps} steps, medians\n\n{make_table(medians)}")
    return 0


def make_rows(folder: Path, steps: int) -> dict[str, Callable[[], float]]:
    """Return a function for each row, which measures its CPU seconds for a step or a sample."""
    eager, compiled = (_recipe(is_compiled=is_compiled) for is_compiled in (False, True))
    corpus = make_corpus(folder, eager, rows=3_000, kind="tiktoken")
    payload = corpus.manifest.corpus
    streams = {
        "checked": TokenStream(corpus.path, payload, "train", CorpusRows(corpus.path, payload)),
        "unchecked": TokenStream(corpus.path, payload, "train", UncheckedRows(corpus.path, payload)),
    }
    steps_of = {row: _prepare_step(recipe, corpus) for row, recipe in zip(STEPS, (eager, compiled), strict=True)}
    return {
        **{row: partial(_measure, step, steps) for row, step in steps_of.items()},
        **{row: partial(_measure_reading, stream) for row, stream in streams.items()},
    }


def make_table(medians: dict[str, float]) -> str:
    recipe = _recipe(is_compiled=False)
    a_sample = medians["checked"] - medians["unchecked"]
    lines = ["| | CPU | share that the checks have |", "|---|---|---|"]
    for row in STEPS:
        share = a_sample * recipe.batch.global_batch_size / medians[row]
        lines.append(f"| {row} | {medians[row] * 1e3:,.1f} ms | {share:.4%} |")
    for row in ("checked", "unchecked"):
        of_reading = f"{a_sample / medians[row]:.0%}" if row == "checked" else ""
        what = f"read a sample of {recipe.corpus.sequence_length} tokens, {row}"
        lines.append(f"| {what} | {medians[row] * 1e6:,.2f} us | {of_reading} |")
    return "\n".join(lines)


def _recipe(*, is_compiled: bool) -> Recipe:
    """Return the recipe with a worker that has the samples of one of its workers in a step."""
    batch = load_recipe(RECIPE).batch
    return load_recipe(
        RECIPE,
        {
            "parallel.data_parallel_size": 1,
            "batch.global_batch_size": batch.global_batch_size // 2,
            "compile.enabled": is_compiled,
        },
    )


def _prepare_step(recipe: Recipe, corpus: Artifact[CorpusManifest]) -> Callable[[int], None]:
    program, mesh = make_program(recipe), Mesh(0, data_parallel_size=1)
    rows = UncheckedRows(corpus.path, corpus.manifest.corpus)
    stream = Mixture([TokenStream(corpus.path, corpus.manifest.corpus, "train", rows)])

    def step(number: int) -> None:
        result = program.train_step(number, list(micro_batches(stream, recipe, number, mesh)))
        program.backend.read(result._asdict())

    for number in range(STEPS_LEFT_OUT):
        step(number)
    return step


def _measure(step: Callable[[int], None], steps: int) -> float:
    begin = time.process_time()
    for number in range(steps):
        step(STEPS_LEFT_OUT + number)
    return (time.process_time() - begin) / steps


def _measure_reading(stream: TokenStream) -> float:
    order = np.random.default_rng(0).integers(0, stream.num_samples, SAMPLES).reshape(-1, 4)
    begin = time.process_time()
    for samples in order:
        stream.read(samples)
    return (time.process_time() - begin) / SAMPLES


if __name__ == "__main__":
    sys.exit(main())
