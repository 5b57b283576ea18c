"""A corpus of any size is opened by its manifest alone, and read with few maps and little memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from services.common.artifacts.corpus import SPLITS, CorpusManifest, CorpusPayload, SplitCounts, Vocabulary
from services.common.artifacts.corpus import shard_path as shard
from services.common.artifacts.corpus_rows import MAX_MAPS, CorpusRows
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError
from services.common.testing.corpora import corpus_payload
from services.trainer.tests.builders import make_corpus, make_recipe, write_rows

ROWS = 130
"""Rows of each split, so that both splits together have more files than a reader maps."""
LENGTH = 4096


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    """Publish a corpus of 130 shards of a row in each split."""
    folder = tmp_path_factory.mktemp("corpus")
    return make_corpus(folder / "fsx", make_recipe(folder, corpus__rows_per_shard="1"), rows=ROWS)


def count_maps(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(folder) in line and line.endswith(".arrow") for line in lines)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps in Linux's /proc")
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
    few = TokenStream(corpus.path, corpus.manifest.corpus, split, CorpusRows(corpus.path, corpus.manifest.corpus, 5))
    order = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(stream.read(order), few.read(order))


def test_a_stream_is_opened_without_any_of_its_files(corpus: Artifact[CorpusManifest], tmp_path: Path) -> None:
    stream = TokenStream(tmp_path, corpus.manifest.corpus, "train")

    stream.prefetch(range(ROWS))  # leaves damage to the read
    assert stream.num_samples == ROWS
    with pytest.raises(ArtifactError, match=r"shard-000007\.arrow"):
        stream.read([7])


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux's kernel")
def test_the_kernel_reads_the_rows_that_were_prefetched(tmp_path: Path) -> None:
    """The row lies 12 MB away from what is read to map the file, which is more than the kernel reads by itself."""
    payload, path, at = make_payload(rows=3_000), tmp_path / shard("train", 0), 1_500 * LENGTH * 2
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


def make_payload(rows: int) -> CorpusPayload:
    """Return the payload of a corpus of one full shard, whose validation split has a tail alone."""
    counts = {
        split: SplitCounts(
            documents=1,
            text_bytes=1,
            document_tokens=num_rows * LENGTH + 3,
            bos=1,
            eos=1,
            rows=num_rows,
            tail_tokens=5,
            check_digests=("0" * 32,) * (2 if num_rows else 1),
        )
        for split, num_rows in zip(SPLITS, (rows, 0), strict=True)
    }
    vocabulary = Vocabulary(kind="sentencepiece", path="v", sha256="0" * 64, vocab_size=300, bos_id=1, eos_id=2)
    return corpus_payload(vocabulary, counts, sequence_length=LENGTH, rows_per_shard=rows, token_dtype="uint16")
