"""Measures encoders of a byte-level vocabulary of 128,000 pieces on one core, with new text and with text seen before.

    python -m benchmarks.tokenizer.byte_level                          60 MB of the installed packages, 5 rounds
    python -m benchmarks.tokenizer.byte_level --work DIR               keeps the vocabulary, minutes of training

Every encoder runs in its own process, pinned to one core; gigatoken is a row where it is installed. A rate is text per
CPU second, the median of the rounds; the ratios are medians of the ratios within a round. The first pass begins without
a chunk of the text, the second has seen all of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

from benchmarks.machine import describe_machine
from benchmarks.package_text import read_text
from benchmarks.rounds import measure_rounds
from benchmarks.tokenizer.row_measurement import Watch
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN

VOCAB_SIZE, TRAINING_BYTES = 128_000, 120_000_000
REPOSITORY = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=0, help="the core that every encoder is pinned to")
    parser.add_argument("--work", type=Path, help="folder for the vocabulary")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(arguments.row, arguments.work, arguments.megabytes)))
        return
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        arguments.work = arguments.work or Path(folder)
        arguments.work.mkdir(parents=True, exist_ok=True)
        train(arguments.work / "tokenizer.json")
        text = read_text(None, arguments.megabytes * 10**6, half=0)
        print(f"machine   {describe_machine()}\ntext      {text.description}")
        print(table(measure_rounds(tuple(ROWS), arguments.rounds, partial(run, arguments))))


def table(measured: dict[str, list[dict[str, Any]]]) -> str:
    """Format rates and ratios to fastokens. The ids of all rows must be equal."""
    assert len({one["ids"] for rounds in measured.values() for one in rounds}) == 1, "the ids differ"
    lines = [f"{'':<16}{'new text':>9}{'x fastokens':>13}{'seen text':>11}{'x fastokens':>13}   MB/s"]
    for row, rounds in measured.items():
        line = f"{row:<16}"
        for name, width in (("new", 9), ("seen", 11)):
            ratios = [one[name] / base[name] for one, base in zip(rounds, measured["fastokens"], strict=True)]
            line += f"{statistics.median(one[name] for one in rounds):>{width}.0f}{statistics.median(ratios):>13.2f}"
        lines.append(line)
    return "\n".join(lines)


def run(arguments: argparse.Namespace, row: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tokenizer.byte_level", "--row", row, "--work", str(arguments.work)]
    command += ["--megabytes", str(arguments.megabytes)]
    pin = partial(os.sched_setaffinity, 0, {arguments.core})
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True, preexec_fn=pin)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(row: str, folder: Path, megabytes: int) -> dict[str, Any]:
    """Encode the text twice, and return MB/s of either pass and a digest of the ids."""
    documents = read_text(None, megabytes * 10**6, half=0).documents
    encode = ROWS[row]((folder / "tokenizer.json").read_bytes(), documents)
    result: dict[str, Any] = {}
    for name in ("new", "seen"):
        watch = Watch()
        ids = encode()
        result[name] = sum(map(len, documents)) / 1e6 / (watch.stop().cpu_seconds or 0)
    joined = np.concatenate(ids)
    return result | {"ids": watch.stop().add_ids([joined[joined < VOCAB_SIZE]]).ids_digest}


def chunk_kernel(content: bytes, documents: list[bytes]) -> Callable[[], Any]:
    from services.common.artifacts.corpus import Vocabulary  # noqa: PLC0415
    from services.tokenizer.encoding.byte_level import ByteLevelEncoder, load_byte_level  # noqa: PLC0415
    from services.tokenizer.text_batch import in_batches  # noqa: PLC0415

    # The other rows have no EOS.
    vocabulary = Vocabulary.model_construct(
        kind="tokenizer_json", vocab_size=VOCAB_SIZE + 1, bos_id=None, eos_id=VOCAB_SIZE
    )
    encoder = load_byte_level(content, vocabulary)
    assert isinstance(encoder, ByteLevelEncoder), encoder
    batches = list(in_batches(documents))
    return lambda: [encoder.encode(batch)[0] for batch in batches]


def fastokens(content: bytes, documents: list[bytes]) -> Callable[[], Any]:
    import fastokens  # noqa: PLC0415

    tokenizer = fastokens.Tokenizer.from_json_str(content.decode())
    texts = [document.decode() for document in documents]
    return lambda: [np.frombuffer(tokenizer.encode_batch_flat(texts, split_special_tokens=True)[0], np.uint32)]


def gigatoken(content: bytes, documents: list[bytes]) -> Callable[[], Any]:
    module, awkward = map(importlib.import_module, ("gigatoken", "awkward"))
    tokenizer, source = module.Tokenizer.from_json(content), module.BytesSource(documents)
    return lambda: [awkward.flatten(tokenizer.encode_batch(source, parallel=False)).to_numpy()]


ROWS = {"chunk_kernel": chunk_kernel, "fastokens": fastokens}
if importlib.util.find_spec("gigatoken"):
    ROWS["gigatoken"] = gigatoken


def train(path: Path) -> None:
    """Train a vocabulary with Llama 3's pattern on text that is not measured, unless the file is there."""
    if path.exists():
        return
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    texts = read_text(None, TRAINING_BYTES, half=1).documents
    tokenizer.train_from_iterator((document.decode() for document in texts), trainer)
    tokenizer.save(str(path))


if __name__ == "__main__":
    main()
