"""Damage in a row of a corpus ends its reader with that row's name, and all other rows can be read."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from services.common.artifacts.corpus import CorpusManifest, CorpusPayload, shard_path, tail_path
from services.common.artifacts.corpus_rows import CorpusRows
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.artifacts.verification import verify_rows_on_nodes
from services.common.errors import ArtifactError
from services.common.launch.launcher import choose_launcher
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_recipe

INLINE = choose_launcher("inline")
SHARD = shard_path("train", 1)
"""Shard of the rows 32 to 63."""
ROW, ROW_IN_SHARD = 39, 7
"""A row of SHARD in which a document begins."""
LENGTH = 16


class Place(NamedTuple):
    """Bytes of a file."""

    begin: int
    size: int


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    folder = tmp_path_factory.mktemp("published")
    return make_corpus(folder / "fsx", make_recipe(folder))


@pytest.fixture
def corpus(published: Artifact[CorpusManifest], tmp_path: Path) -> Path:
    """Copy the published corpus, so that a test can change it."""
    return Path(shutil.copytree(published.path, tmp_path / "corpus"))


def open_stream(folder: Path, published: Artifact[CorpusManifest]) -> TokenStream:
    return TokenStream(folder, published.manifest.corpus, "train")


def places_of_row(shard: Path) -> dict[str, Place]:
    """Find the bytes of ROW in its file by the addresses of the buffers in the mapped file."""
    source = pa.memory_map(str(shard))
    base = source.read_buffer(1).address
    batch = pa.ipc.open_file(source).get_batch(0)
    ids, starts, check = batch.column("input_ids"), batch.column("doc_starts"), batch.column("check")
    first_start, end_of_starts = starts.offsets[ROW_IN_SHARD].as_py(), starts.offsets[ROW_IN_SHARD + 1].as_py()
    assert end_of_starts > first_start
    addresses = {
        "ids": (ids.values.buffers()[1].address + ROW_IN_SHARD * LENGTH * 2, LENGTH * 2),
        "doc_starts": (starts.values.buffers()[1].address + first_start * 4, (end_of_starts - first_start) * 4),
        "end of doc_starts": (starts.buffers()[1].address + (ROW_IN_SHARD + 1) * 4, 4),
        "check": (check.buffers()[1].address + ROW_IN_SHARD * 8, 8),
    }
    return {name: Place(address - base, size) for name, (address, size) in addresses.items()}


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def rows_found_damaged(stream: TokenStream) -> dict[int, str]:
    """Read all samples one by one; return the messages of those that cannot be read."""
    found = {}
    for sample in range(stream.num_padded_samples):
        try:
            stream.read([sample])
        except ArtifactError as error:
            found[sample] = str(error)
    return found


@pytest.mark.parametrize("column", ["ids", "doc_starts", "check"])
def test_a_flipped_bit_in_any_byte_of_a_row_names_the_row_and_costs_only_the_samples_that_use_it(
    published: Artifact[CorpusManifest], corpus: Path, column: str
) -> None:
    """The last target of the sample before is the first token of the row."""
    expected = open_stream(corpus, published).read(np.arange(81))
    place = places_of_row(corpus / SHARD)[column]
    for at in range(place.begin, place.begin + place.size):
        flip(corpus / SHARD, at, bit=at % 8)
        with pytest.raises(ArtifactError) as caught:
            open_stream(corpus, published).read([ROW])
        assert f"{SHARD}: row {ROW_IN_SHARD} of this file, row {ROW} of train" in str(caught.value)
        flip(corpus / SHARD, at, bit=at % 8)

    flip(corpus / SHARD, place.begin)
    stream = open_stream(corpus, published)
    damaged = rows_found_damaged(stream)
    assert set(damaged) == {ROW - 1, ROW}
    assert all(f"row {ROW} of train" in said for said in damaged.values())
    others = [sample for sample in range(81) if sample not in damaged]
    assert np.array_equal(stream.read(others), expected[others])
    with pytest.raises(ArtifactError, match=f"row {ROW} of train"):
        verify_rows_on_nodes(INLINE, corpus, published.manifest.corpus)


def test_a_flipped_document_start_is_damage_of_a_row_beside_it_and_ends_an_evaluation(
    published: Artifact[CorpusManifest], corpus: Path
) -> None:
    """An offset ends one row's list and begins the next. An evaluation reads starts without their rows' checks."""
    places = places_of_row(corpus / SHARD)
    for name, rows in (("doc_starts", {ROW - 1, ROW}), ("end of doc_starts", {ROW - 1, ROW, ROW + 1})):
        for at in range(places[name].begin, places[name].begin + places[name].size):
            flip(corpus / SHARD, at, bit=7)
            assert set(rows_found_damaged(open_stream(corpus, published))) == rows
            with pytest.raises(ArtifactError):
                open_stream(corpus, published).document_begins()
            flip(corpus / SHARD, at, bit=7)


def test_damage_in_the_tail_is_damage_of_the_last_row(published: Artifact[CorpusManifest], corpus: Path) -> None:
    content = (corpus / tail_path("train")).read_bytes()
    tail = CorpusRows(corpus, published.manifest.corpus).read("train", 80)
    flip(corpus / tail_path("train"), content.index(tail.ids.tobytes()))

    damaged = rows_found_damaged(open_stream(corpus, published))

    assert set(damaged) == {79, 80}
    assert all(f"{tail_path('train')}: row 0 of this file, row 80 of train" in said for said in damaged.values())


def swap_rows(folder: Path) -> None:
    """Swap two rows of a shard with their checks; both have the same document starts."""
    assert 3 * LENGTH == 2 * DOCUMENT_TOKENS
    places, content = places_of_row(folder / SHARD), bytearray((folder / SHARD).read_bytes())
    for name, size in (("ids", LENGTH * 2), ("check", 8)):
        begin = places[name].begin
        one, other = slice(begin, begin + size), slice(begin + 3 * size, begin + 4 * size)
        content[one], content[other] = content[other], content[one]
    (folder / SHARD).write_bytes(content)


def link_a_shard_twice(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.link(folder / shard_path("train", 0), folder / SHARD)


@pytest.mark.parametrize(
    ("change", "damaged_rows"),
    [
        (swap_rows, {ROW, ROW + 3}),
        (link_a_shard_twice, set(range(32, 64))),
    ],
)
def test_an_intact_row_in_another_place_is_damage(
    published: Artifact[CorpusManifest], corpus: Path, change: Callable[[Path], None], damaged_rows: set[int]
) -> None:
    change(corpus)

    damaged = rows_found_damaged(open_stream(corpus, published))

    named = {int(re.findall(r"row (\d+) of train", said)[0]) for said in damaged.values()}
    assert named == damaged_rows
    assert set(damaged) == {max(0, row - 1) for row in damaged_rows} | damaged_rows


def test_verify_finds_a_shard_of_another_corpus_whose_rows_fit_their_checks(
    published: Artifact[CorpusManifest], corpus: Path
) -> None:
    """A reader cannot tell, and `verify` compares the digest of the checks with the manifest."""
    mine = published.manifest.corpus
    values = mine.model_dump()
    values["splits"]["train"]["check_digests"] = ("0" * 32, *mine.splits["train"].check_digests[1:])
    other = CorpusPayload.model_validate(values)

    verify_rows_on_nodes(INLINE, corpus, mine)
    assert rows_found_damaged(TokenStream(corpus, other, "train")) == {}
    with pytest.raises(ArtifactError, match=shard_path("train", 0)):
        verify_rows_on_nodes(INLINE, corpus, other)
