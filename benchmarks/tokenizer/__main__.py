"""Measures the tokenizer and its alternatives on the same text, in one run.

    python -m benchmarks.tokenizer                          100 MB of the installed packages, 3 rounds, 2 vocabularies
    python -m benchmarks.tokenizer --megabytes 60,200,1000 --only stage_1,stage_2         one and two processes
    python -m benchmarks.tokenizer --text DIR --megabytes 300 --rounds 5 --model llama2.model --only kernel_warm,anchor

Every row of the table runs in its own process. The rows of a round run one after another, so that other load on the
machine affects all rows. A rate is the median of the rounds: text per CPU second, or text per second of wall time for
rows that compare numbers of processes. Only the rates of `stage_1` and `stage_2` include the start of a program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.package_text import Text, read_text
from benchmarks.rounds import measure_rounds
from benchmarks.tokenizer.benchmark_folder import BenchmarkFolder
from benchmarks.tokenizer.encoder_rows import (
    fastokens_batch,
    kernel_cold,
    kernel_warm,
    sentencepiece_batch,
    tokenizers_batch,
)
from benchmarks.tokenizer.reading_rows import read_anchor, read_memmap, read_ours, read_ours_eight
from benchmarks.tokenizer.row_measurement import RowMeasurement, peak_memory_bytes
from benchmarks.tokenizer.stage_rows import (
    anchor,
    cold_1,
    cold_2,
    duplicates_1,
    encode_1,
    encode_2,
    overlap_1,
    stage_1,
    stage_2,
    warm_1,
    warm_2,
)
from services.tokenizer.vocabulary.training import take_first, train_vocabulary

REPOSITORY = Path(__file__).parents[2]
VOCAB_SIZE = 32_000
TRAINING_BYTES = 20_000_000
ENCODING = (anchor, tokenizers_batch, sentencepiece_batch, fastokens_batch, kernel_cold, kernel_warm)
PROCESSES = (cold_1, cold_2, warm_1, warm_2, encode_1, encode_2, overlap_1, stage_1, stage_2, duplicates_1)
READING = (read_anchor, read_memmap, read_ours, read_ours_eight)
ROWS = {row.__name__: row for row in (*ENCODING, *PROCESSES, *READING)}
# The table compares single cores, and Rayon would use all of them.
ONE_CORE = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    if arguments.row:
        run_row(arguments.row, BenchmarkFolder(arguments.folder), arguments.result)
        return 0
    print(f"machine   {describe_machine()}")
    vocabularies = _vocabularies(arguments.model)
    for megabytes in arguments.megabytes:
        text = read_text(arguments.text, megabytes * 10**6, half=None if arguments.text else 0)
        _measure(text.repeat_to(megabytes * 10**6), vocabularies, arguments)
    return 0


def _measure(text: Text, vocabularies: dict[str, bytes], arguments: argparse.Namespace) -> None:
    """Measure the rows for a text with every vocabulary, and print a table for each."""
    print(f"\ntext      {text.description}")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-", dir=arguments.work) as folder:
        for name, model in vocabularies.items():
            print(f"\nvocabulary {name}")
            bench = BenchmarkFolder(Path(folder) / name)
            bench.fill(text, model)
            rows = arguments.only or tuple(ROWS)
            measured = measure_rounds(rows, arguments.rounds, partial(_run_in_process, bench))
            print(table(measured, text), flush=True)


def run_row(name: str, bench: BenchmarkFolder, result: Path) -> None:
    """Run a row, write its measurement, and remove the files that it stored."""
    try:
        measured = ROWS[name](bench)
    finally:
        shutil.rmtree(bench.output, ignore_errors=True)
    measured.peak_memory_bytes = peak_memory_bytes()
    result.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def table(measured: dict[str, list[RowMeasurement]], text: Text) -> str:
    """Format rates, ratios to the anchor and to fastokens, stored bytes, peak memory, and whether ids are equal."""
    rates = {row: statistics.median(one.rate(text.bytes) for one in rounds) for row, rounds in measured.items()}
    reference = measured.get("sentencepiece_batch")
    reading = [row.__name__ for row in READING]
    lines = [f"{'':<22}{'MB/s':>9}{'x anchor':>10}{'x fastokens':>12}{'B/token':>9}{'peak MB':>9}  ids"]
    for row in [row for row in measured if row not in reading]:
        last = measured[row][-1]
        # Rates by wall time have no ratio to rates by CPU time, and memory of child processes is not measured.
        is_alone = last.cpu_seconds is not None
        ratios = [_ratio(rates, row, base) if is_alone else "" for base in ("anchor", "fastokens_batch")]
        stored = f"{last.stored_bytes / last.tokens:.3f}" if last.stored_bytes else ""
        memory = f"{last.peak_memory_bytes / 1e6:,.0f}" if is_alone else ""
        same = ""
        if reference and last.ids_digest:
            same = "SentencePiece's" if last.ids_digest == reference[-1].ids_digest else "OTHERS"
        notes = "; ".join([*([same] if same else []), *last.notes])
        line = f"{row:<22}{rates[row]:>9.2f}{ratios[0]:>10}{ratios[1]:>12}{stored:>9}{memory:>9}  {notes}"
        lines.append(line.rstrip())
    for what in ("cold", "warm", "encode", "stage"):
        if measured.keys() >= {f"{what}_1", f"{what}_2"}:
            lines.append(f"{what + ', 2 over 1':<22}{_scaling(measured[f'{what}_1'], measured[f'{what}_2'])}")
    if any(row in measured for row in reading):
        lines.append(f"{'':<22}{'samples/s':>12}{'x anchor':>10}")
    for row in [row for row in measured if row in reading]:
        notes = "; ".join(measured[row][-1].notes)
        lines.append(f"{row:<22}{rates[row]:>12,.0f}{_ratio(rates, row, 'read_anchor'):>10}  {notes}".rstrip())
    return "\n".join(lines)


def _ratio(rates: dict[str, float], row: str, base: str) -> str:
    return f"{rates[row] / rates[base]:.1f}" if base in rates else ""


def _scaling(ones: Sequence[RowMeasurement], twos: Sequence[RowMeasurement]) -> str:
    """Format the ratios of two processes to one by wall time, with the median, minimum and maximum of the rounds."""
    ratios = sorted(
        (two.texts / two.wall_seconds) / (one.texts / one.wall_seconds) for one, two in zip(ones, twos, strict=True)
    )
    return f"{statistics.median(ratios):>9.2f}x  from {ratios[0]:.2f}x to {ratios[-1]:.2f}x in {len(ratios)} rounds"


def _run_in_process(bench: BenchmarkFolder, row: str) -> RowMeasurement:
    result = bench.folder / "result.json"
    command = [sys.executable, "-m", "benchmarks.tokenizer", "--row", row]
    log = bench.folder / f"{row}.log"
    with log.open("wb") as file:
        done = subprocess.run(
            [*command, "--folder", str(bench.folder), "--result", str(result)],
            cwd=REPOSITORY,
            env={**os.environ, **ONE_CORE},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{row} ended with {done.returncode}:\n{log.read_text(encoding='utf-8')[-4_000:]}")
    return RowMeasurement(**json.loads(result.read_text(encoding="utf-8")))


def _vocabularies(given: Path | None) -> dict[str, bytes]:
    """Train vocabularies on text that is not measured: on code, unless a model is given, and on other files."""
    others = read_text(None, 10**9, half=1).documents

    def train(is_code: bool) -> bytes:
        documents = (document for document in others if (b"import " in document) == is_code)
        return train_vocabulary(take_first(documents, TRAINING_BYTES), VOCAB_SIZE)

    first = {"given": given.read_bytes()} if given else {"trained-on-code": train(is_code=True)}
    return {**first, "trained-on-other-files": train(is_code=False)}


def _rows(names: str) -> tuple[str, ...]:
    rows = tuple(names.split(","))
    if unknown := [row for row in rows if row not in ROWS]:
        raise argparse.ArgumentTypeError(f"unknown rows {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenizer", description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="a folder of text files (default: the installed packages)")
    parser.add_argument("--model", type=Path, help="a SentencePiece model, which replaces the one trained on code")
    parser.add_argument(
        "--megabytes",
        type=lambda sizes: tuple(map(int, sizes.split(","))),
        default=(100,),
        metavar="SIZE,...",
        help="sizes of the text (default: 100); a size above that of the source repeats its text",
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--only", type=_rows, metavar="ROW,...", help=f"rows to run (default: all): {', '.join(ROWS)}")
    parser.add_argument("--work", type=Path, help="folder for temporary files")
    for internal in ("--row", "--folder", "--result"):
        parser.add_argument(internal, type=str if internal == "--row" else Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
