"""The tokenizer beside its alternatives, on the same text, in one run.

    python -m benchmarks.tokenizer                          100 MB of the installed packages, 3 rounds, 2 vocabularies
    python -m benchmarks.tokenizer --text DIR --megabytes 300 --rounds 5 --model llama2.model --only kernel_warm,anchor

Every row runs in a process of its own, the rows of a round one after another, so that what else the machine does meets
all of them. A rate is text per CPU second (the median of the rounds); of rows that compare processes per second of
wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.package_text import Text, read_text
from benchmarks.tokenizer_rows import Measurement, Workbench, run_row
from services.tokenizer.encoding.sentencepiece_model import load_model
from services.tokenizer.vocabulary_training import take_first, train_vocabulary

REPOSITORY = Path(__file__).parents[1]
VOCAB_SIZE = 32_000
TRAINING_BYTES = 20_000_000
ENCODING = ("anchor", "tokenizers_batch", "sentencepiece_batch", "fastokens_batch", "kernel_cold", "kernel_warm")
STAGE = ("kernel_alone", "kernel_two", "stage_alone", "stage_two", "encode_alone", "encode_two")
READING = ("read_anchor", "read_memmap", "read_ours", "read_ours_eight")
# Rayon takes every core; the table compares cores.
ONE_CORE = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_WALL_TIME = {"kernel_alone", "kernel_two", "stage_two", "encode_two", "encode_alone"}


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    if arguments.row:
        run_row(arguments.row, arguments.folder, arguments.result)
        return 0
    text = read_text(arguments.text, arguments.megabytes * 10**6, half=None if arguments.text else 0)
    print(f"machine   {describe_machine()}\ntext      {text.description}")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-", dir=arguments.work) as folder:
        for name, model in _vocabularies(arguments.model).items():
            print(f"\nvocabulary {name}")
            bench = Workbench(Path(folder) / name)
            _prepare(bench, text, model)
            wanted = arguments.only or (*ENCODING, *STAGE, *READING)
            print(table(measure(bench, wanted, arguments.rounds), text))
    return 0


def measure(bench: Workbench, rows: Sequence[str], rounds: int) -> dict[str, list[Measurement]]:
    measured: dict[str, list[Measurement]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            print(f"round {number + 1} of {rounds}: {row}", file=sys.stderr, flush=True)
            measured[row].append(_run_in_process(bench, row))
    return measured


def table(measured: dict[str, list[Measurement]], text: Text) -> str:
    """Rates and their ratios to the anchor and to the best exact peer, what is stored, memory, and whose ids."""
    rates = {row: statistics.median(_rate(row, each, text.bytes) for each in all_) for row, all_ in measured.items()}
    reference = measured.get("sentencepiece_batch")
    lines = [f"{'':<22}{'MB/s':>9}{'x anchor':>10}{'x fastokens':>12}{'B/token':>9}{'peak MB':>9}  ids"]
    for row in [row for row in measured if row not in READING]:
        last = measured[row][-1]
        stored = f"{last.stored_bytes / last.tokens:.3f}" if last.stored_bytes else ""
        same = ""
        if reference and last.ids_digest:
            same = "SentencePiece's" if last.ids_digest == reference[-1].ids_digest else "OTHERS"
        lines.append(
            f"{row:<22}{rates[row]:>9.2f}{_ratio(rates, row, 'anchor'):>10}{_ratio(rates, row, 'fastokens_batch'):>12}"
            f"{stored:>9}{last.peak_memory_bytes / 1e6:>9,.0f}  {'; '.join([same, *last.notes]).strip('; ')}"
        )
    for what in ("kernel", "encode"):
        if rates.keys() >= {f"{what}_two", f"{what}_alone"}:
            lines.append(f"two processes over one, {what}: {rates[f'{what}_two'] / rates[f'{what}_alone']:.2f}x")
    if any(row in measured for row in READING):
        lines.append(f"{'':<22}{'samples/s':>12}{'x anchor':>10}")
    for row in [row for row in measured if row in READING]:
        lines.append(f"{row:<22}{rates[row]:>12,.0f}{_ratio(rates, row, 'read_anchor'):>10}")
    return "\n".join(lines)


def describe_machine() -> str:
    processor = platform.processor() or platform.machine()
    for line in (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else ()
    ):
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    return f"{processor}, {os.cpu_count()} CPUs, load {load:.1f} at the start, Python {platform.python_version()}"


def _rate(row: str, measured: Measurement, text_bytes: int) -> float:
    if measured.samples:
        return measured.samples / measured.cpu_seconds
    return text_bytes / 1e6 / (measured.wall_seconds if row in ON_WALL_TIME else measured.cpu_seconds)


def _ratio(rates: dict[str, float], row: str, base: str) -> str:
    return f"{rates[row] / rates[base]:.1f}" if base in rates else ""


def _run_in_process(bench: Workbench, row: str) -> Measurement:
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
    return Measurement(**json.loads(result.read_text(encoding="utf-8")))


def _vocabularies(given: Path | None) -> dict[str, bytes]:
    """Two, of which none has seen the text that is measured: of code, or the given one, and of the other files."""
    others = read_text(None, 10**9, half=1).documents

    def train(is_code: bool) -> bytes:
        documents = (document for document in others if (b"import " in document) == is_code)
        return train_vocabulary(take_first(documents, TRAINING_BYTES), VOCAB_SIZE)

    first = {"given": given.read_bytes()} if given else {"trained-on-code": train(is_code=True)}
    return {**first, "trained-on-other-files": train(is_code=False)}


def _prepare(bench: Workbench, text: Text, model: bytes) -> None:
    bench.hugging_face.mkdir(parents=True)
    bench.model.write_bytes(model)
    (bench.hugging_face / "tokenizer.model").write_bytes(model)
    (bench.hugging_face / "tokenizer.json").write_text(json.dumps(_tokenizer_json(model)), encoding="utf-8")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (bench.hugging_face / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    column = pa.array([document.decode() for document in text.documents], pa.string())
    pq.write_table(pa.table({"text": column}), bench.parquet, compression="zstd", row_group_size=100)


def _tokenizer_json(model: bytes) -> dict[str, object]:
    """The tokenizer.json that gives SentencePiece's ids: merges by score, a space for each space, none added twice."""
    processor = load_model(model)
    pieces = [str(processor.id_to_piece(index)) for index in range(processor.vocab_size())]
    id_of_piece = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (-processor.get_score(index), len(piece[:cut]), piece[:cut], piece[cut:])
        for index, piece in enumerate(pieces)
        if not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))
        for cut in range(1, len(piece))
        if piece[:cut] in id_of_piece and piece[cut:] in id_of_piece
    ]
    special = [(index, piece) for index, piece in enumerate(pieces) if index < 3]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": piece, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for index, piece in special
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": id_of_piece,
            "merges": [[left, right] for _, _, left, right in sorted(merges)],
        },
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenizer", description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="a folder of text files; default: the installed packages")
    parser.add_argument("--model", type=Path, help="a SentencePiece model to measure besides a trained one")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda names: tuple(names.split(",")), help="rows, separated by commas")
    parser.add_argument("--work", type=Path, help="where to put temporary files")
    for internal in ("--row", "--folder", "--result"):
        parser.add_argument(internal, type=str if internal == "--row" else Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
