"""Compressed files, JSON lines and archives with flipped, overwritten or missing bytes are read, or refused by name."""

from __future__ import annotations

import bz2
import gzip
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.common.testing.seeds import draw_seed
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.bad_input.stage import TEXTS, jsonl
from services.tokenizer.tests.bad_input.test_archives import ARTICLE, write_archive
from services.tokenizer.tests.bad_input.test_lines import CODECS

DAMAGED_FILES = 40
EXTREMES = [b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 7 + b"\x7f"]


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0.jsonl", jsonl(TEXTS))


def articles() -> str:
    return "".join(ARTICLE % ("T", text) for text in TEXTS[:9])


FORMATS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS))),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(jsonl(TEXTS))),
    "a.jsonl.xz": lambda path: path.write_bytes(CODECS[".xz"](jsonl(TEXTS))),
    "a.jsonl.zst": lambda path: path.write_bytes(CODECS[".zst"](jsonl(TEXTS))),
    "a.jsonl.lz4": lambda path: path.write_bytes(CODECS[".lz4"](jsonl(TEXTS))),
    "a.jsonl.zip": write_zip,
    "raw.tar": lambda path: write_archive(path, articles(), mode="w"),
    "raw.tgz": lambda path: write_archive(path, articles()),
}


def damage(content: bytes, chosen: random.Random) -> bytes:
    """Damage a file at random. Its begin, its end and the rest are damaged equally often."""
    begin, end = chosen.choice([(0, len(content)), (0, min(len(content), 600)), (max(0, len(content) - 1_500), None)])
    at = chosen.randrange(begin, len(content) if end is None else end)
    match chosen.randrange(4):
        case 0:
            return content[:at] + bytes([content[at] ^ 1 << chosen.randrange(8)]) + content[at + 1 :]
        case 1:
            return content[:at]
        case 2:
            extreme = chosen.choice(EXTREMES)
            return content[:at] + extreme + content[at + len(extreme) :]
        case _:
            return content[:at] + chosen.randbytes(chosen.randrange(1, 20)) + content[at + 1 :]


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_bytes_are_read_or_refused_and_never_a_bug(tmp_path: Path, name: str) -> None:
    chosen = random.Random(draw_seed())
    path = tmp_path / name
    FORMATS[name](path)
    good = path.read_bytes()
    source = Source(uri=str(path), format="wikicorpus" if name.startswith("raw") else "auto")
    refusals = []
    for number in range(DAMAGED_FILES):
        path.write_bytes(damage(good, chosen))
        print(f"damaged file {number}, kept as {path}")
        try:
            for file in list_inputs(source):
                list(read_documents(cut_file(file, 3_000, 2**20), "replace", 2**20))
        except (ArtifactError, RecipeError) as error:
            refusals.append(str(error))
    assert all(name in refusal for refusal in refusals)
