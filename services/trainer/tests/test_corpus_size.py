"""A corpus of any size is opened by its manifest alone, and read with few maps and little memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from services.common.artifacts.corpus import (
    SPLITS,
    CorpusManifest,
    CorpusPayload,
    Split,
    SplitCounts,
    Vocabulary,
    arrow_schema,
)
from services.common.artifacts.corpus import shard_path as shard
from services.common.artifacts.corpus_rows import MAX_MAPS, CorpusRows, check_row
from services.common.artifacts.manifest import FileEntry, producer
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError
from services.common.testing.corpora import corpus_payload
from services.trainer.tests.builders import make_corpus, make_recipe, write_rows
from services.trainer.tests.runs import REPOSITORY

ROWS = 130
"""Rows of each split, so that both splits together have more files than a reader maps."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    """Publish a corpus of 130 shards of a row in each split."""
    folder = tmp_path_factory.mktemp("corpus")
    return make_corpus(folder / "fsx", make_recipe(folder, corpus__rows_per_shard="1"), rows=ROWS)


def count_maps(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(folder) in line and line.endswith(".arrow") for line in lines)


needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps in Linux's /proc")


@needs_proc
def test_a_reader_maps_the_files_used_last_and_reads_the_same_samples(corpus: Artifact[CorpusManifest]) -> None:
    before, payload, order = count_maps(corpus.path), corpus.manifest.corpus, np.random.default_rng(0).permutation(ROWS)
    few, whole = CorpusRows(corpus.path, payload, max_maps=5), CorpusRows(corpus.path, payload, max_maps=2 * ROWS + 2)

    for split in SPLITS:
        by_few, by_whole = (TokenStream(corpus.path, payload, split, rows).read(order) for rows in (few, whole))
        assert np.array_equal(by_few, by_whole)
    assert count_maps(corpus.path) - before == 5 + 2 * ROWS + 2


@needs_proc
def test_streams_of_both_splits_share_at_most_256_maps(corpus: Artifact[CorpusManifest]) -> None:
    rows = CorpusRows(corpus.path, corpus.manifest.corpus)
    before, most = count_maps(corpus.path), 0
    for split in SPLITS:
        stream = TokenStream(corpus.path, corpus.manifest.corpus, split, rows)
        for sample in range(stream.num_padded_samples):
            stream.prefetch([sample])
            stream.read_documents([sample])
            if sample % 40 == 0 or sample == ROWS:
                most = max(most, count_maps(corpus.path) - before)

    assert most == MAX_MAPS == 256


def test_a_stream_is_opened_without_any_of_its_files(corpus: Artifact[CorpusManifest], tmp_path: Path) -> None:
    stream = TokenStream(tmp_path, corpus.manifest.corpus, "train")

    stream.prefetch(range(ROWS))  # leaves damage to the read
    assert stream.num_samples == ROWS
    with pytest.raises(ArtifactError, match=r"shard-000007\.arrow"):
        stream.read([7])


@needs_proc
def test_the_kernel_reads_the_rows_that_were_prefetched(tmp_path: Path) -> None:
    """The row lies 12 MB away from what is read to map the file, which is more than the kernel reads by itself."""
    payload, path, at = (
        make_payload(num_shards=1, rows_per_shard=3_000),
        tmp_path / shard("train", 0),
        1_500 * LENGTH * 2,
    )
    path.parent.mkdir()
    write_rows(path, "train", 0, np.zeros((3_000, LENGTH), np.uint16), [[]] * 3_000)
    drop_pages(path)
    if is_in_memory(path, at):
        pytest.skip("this file system keeps its files in memory")
    stream = TokenStream(tmp_path, payload, "train")

    stream.prefetch([2_998])
    is_read_to_map_the_file = is_in_memory(path, at)
    stream.prefetch([1_500])

    deadline = time.monotonic() + 30
    while not is_in_memory(path, at) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (is_read_to_map_the_file, is_in_memory(path, at)) == (False, True)


def drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_in_memory(path: Path, at: int) -> bool:
    """Ask the kernel for the page of a byte of the file. `preadv` with RWF_NOWAIT would begin to read the page."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content, found = np.frombuffer(mapped, np.uint8), ctypes.create_string_buffer(1)
        address = content.ctypes.data + at // mmap.PAGESIZE * mmap.PAGESIZE
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), found) == 0
        del content
        return bool(found.raw[0] & 1)


LENGTH, ROWS_PER_SHARD, VOCAB_SIZE = 4096, 18_432, 128_256
"""Geometry of a corpus of 15 T tokens in 200,000 shards."""

_PROGRAM = """
import json, sys
from pathlib import Path

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import open_artifact
from services.common.artifacts.token_stream import TokenStream

folder, samples = Path(sys.argv[1]), json.loads(sys.argv[2])
corpus = open_artifact(folder, CorpusManifest).manifest.corpus
stream = TokenStream(folder, corpus, "train")
most = 0
for sample in samples:
    assert stream.read([sample]).shape == (1, corpus.sequence_length + 1)
    lines = Path("/proc/self/maps").read_text().splitlines() if sample % 8 == 0 or sample == samples[-1] else []
    most = max(most, sum(line.endswith(".arrow") for line in lines))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({"tokens": stream.num_tokens, "maps": most, "anonymous_kB": int(status["RssAnon"].split()[0]),
                  "peak_kB": int(status["VmHWM"].split()[0]), "file_kB": int(status["RssFile"].split()[0])}))
"""


@pytest.mark.slow
@needs_proc
def test_a_corpus_of_200_000_shards_is_read_with_256_maps_and_little_memory(tmp_path: Path) -> None:
    """Only the shards that are read exist, so that a look at any other file would end the reader."""
    read = np.random.default_rng(0).choice(190_000, 600, replace=False)
    big, small = tmp_path / "big", tmp_path / "small"
    write_manifest(big, num_shards=200_000)
    write_manifest(small, num_shards=1)
    samples = [int(number) * ROWS_PER_SHARD + 5 for number in read]
    write_sparse_shards(big, samples)

    seen = {folder.name: run_reader(folder, wanted) for folder, wanted in ((big, samples), (small, []))}

    assert seen["big"]["tokens"] > 15e12
    assert seen["big"]["maps"] == MAX_MAPS
    assert seen["big"]["peak_kB"] - seen["small"]["peak_kB"] < 300_000, seen


def run_reader(folder: Path, samples: list[int]) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), json.dumps(samples)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def make_payload(
    num_shards: int, rows_per_shard: int, token_dtype: Literal["uint16", "uint32"] = "uint16"
) -> CorpusPayload:
    """Return the payload of a corpus of so many full shards whose validation split has a tail alone."""
    shards_of_split: dict[Split, int] = {"train": num_shards, "validation": 0}
    splits = {
        split: SplitCounts(
            documents=1,
            text_bytes=1,
            document_tokens=shards * rows_per_shard * LENGTH + 3,
            bos=1,
            eos=1,
            rows=shards * rows_per_shard,
            tail_tokens=5,
            check_digests=tuple(f"{number:032x}" for number in range(shards + 1)),
        )
        for split, shards in shards_of_split.items()
    }
    vocabulary = Vocabulary(
        kind="sentencepiece",
        path="vocabulary",
        sha256="0" * 64,
        vocab_size=VOCAB_SIZE if token_dtype == "uint32" else 300,
        bos_id=1,
        eos_id=2,
    )
    return corpus_payload(
        vocabulary, splits, sequence_length=LENGTH, rows_per_shard=rows_per_shard, token_dtype=token_dtype
    )


def write_manifest(folder: Path, num_shards: int) -> None:
    """Write the manifest of a corpus of ids in 4 bytes."""
    folder.mkdir()
    recipe = make_recipe(
        folder.parent,
        corpus__sequence_length=str(LENGTH),
        corpus__rows_per_shard=str(ROWS_PER_SHARD),
        model__vocab_size=str(VOCAB_SIZE),
        tokenizer__train__vocab_size=str(VOCAB_SIZE),
    )
    payload = make_payload(num_shards, ROWS_PER_SHARD, token_dtype="uint32")
    paths = [path for split in SPLITS for path in payload.row_files(split)]
    CorpusManifest(
        schema_id=CorpusManifest.SCHEMA,
        name=recipe.corpus.name,
        id="0" * 16,
        identity_key="0" * 64,
        created_at=datetime.now(UTC),
        producer=producer("tokenizer"),
        inputs=(),
        recipe=recipe.model_dump(mode="json"),
        files=tuple(
            FileEntry(path=path, bytes=number, xxh3_128=f"{number:032x}", sha256=f"{number * bool(number):064x}")
            for number, path in enumerate(["vocabulary", *paths])
        ),
        corpus=payload,
    ).write(folder)


def write_sparse_shards(folder: Path, rows: list[int]) -> None:
    """Write the shards that have these rows, with ids of 0 and no document starts, of which the disk has a few pages.

    The checks fit in these rows and the following ones alone.
    """
    schema = arrow_schema("uint32", LENGTH)
    ids = np.zeros(ROWS_PER_SHARD * LENGTH, np.uint32)
    marker = np.full(ROWS_PER_SHARD, 2**63 + 5, np.uint64)
    batch = pa.record_batch(
        [
            pa.FixedSizeListArray.from_arrays(pa.array(ids), type=schema.field("input_ids").type),
            pa.ListArray.from_arrays(
                pa.array(np.zeros(ROWS_PER_SHARD + 1, np.int32)),
                pa.array([], pa.int32()),
                type=schema.field("doc_starts").type,
            ),
            pa.array(marker),
        ],
        schema=schema,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    content = memoryview(sink.getvalue())
    checks_begin = bytes(content[-(2 * marker.nbytes) :]).index(marker.tobytes()) + len(content) - 2 * marker.nbytes
    head, tail_begin = bytes(content[:4096]), checks_begin + marker.nbytes
    no_starts = np.empty(0, np.int32)
    (folder / "train").mkdir()
    for row in rows:
        with (folder / shard("train", row // ROWS_PER_SHARD)).open("wb") as file:
            file.truncate(len(content))
            os.pwrite(file.fileno(), head, 0)
            os.pwrite(file.fileno(), content[tail_begin:], tail_begin)
            checks = [check_row("train", each, ids[:LENGTH], no_starts) for each in (row, row + 1)]
            at = checks_begin + row % ROWS_PER_SHARD * 8
            os.pwrite(file.fileno(), np.array(checks, np.uint64).tobytes(), at)
