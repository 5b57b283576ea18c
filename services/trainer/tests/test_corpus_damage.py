"""A damaged row is named, and all others can be read; a corpus whose manifest and files do not fit is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from services.common.artifacts.corpus import CorpusManifest, shard_path, tail_path
from services.common.artifacts.corpus_rows import CorpusRows
from services.common.artifacts.files import verify_files
from services.common.artifacts.store import CURRENT, Artifact, open_artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.artifacts.upstream import open_corpus
from services.common.artifacts.verification import verify_artifact, verify_rows_on_nodes
from services.common.errors import ArtifactError, DeviceError
from services.common.launch.launcher import choose_launcher
from services.common.testing.manifests import forge
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_recipe, write_rows

INLINE = choose_launcher("inline")
SHARD, TAIL = shard_path("train", 1), tail_path("train")
"""SHARD has the rows 32 to 63."""
ROW, ROW_IN_SHARD, LENGTH = 39, 7, 16
"""A row of SHARD in which a document begins."""

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    folder = tmp_path_factory.mktemp("published")
    return make_corpus(folder / "fsx", make_recipe(folder))


@pytest.fixture
def corpus(published: Artifact[CorpusManifest], tmp_path: Path) -> Path:
    """Copy the published corpus, so that a test can change it."""
    return Path(shutil.copytree(published.path, tmp_path / "corpus"))


def open_stream(folder: Path) -> TokenStream:
    return TokenStream(folder, CorpusManifest.read(folder).corpus, "train")


def places_of_row(shard: Path) -> dict[str, range]:
    """Return the bytes of ROW in its file, by the addresses of the buffers in the mapped file."""
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
    return {name: range(address - base, address - base + size) for name, (address, size) in addresses.items()}


def flip(path: Path, at: int) -> None:
    """Flip the highest bit of a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 128
    path.write_bytes(content)


def damaged_samples(stream: TokenStream) -> dict[int, str]:
    """Return the messages of the samples that cannot be read, one by one."""
    found = {}
    for sample in range(stream.num_padded_samples):
        try:
            stream.read([sample])
        except ArtifactError as error:
            found[sample] = str(error)
    return found


@pytest.mark.parametrize("column", ["ids", "doc_starts", "check", "end of doc_starts"])
def test_a_flipped_bit_in_any_byte_of_a_row_names_the_row_and_costs_only_the_samples_that_use_it(
    corpus: Path, column: str
) -> None:
    """The last target of the sample before is the row's first token. An offset of starts is that of two rows."""
    expected, place = open_stream(corpus).read(np.arange(81)), places_of_row(corpus / SHARD)[column]
    samples = {ROW - 1, ROW, ROW + 1} if column == "end of doc_starts" else {ROW - 1, ROW}
    for at in place:
        flip(corpus / SHARD, at)
        damaged = damaged_samples(open_stream(corpus))
        assert set(damaged) == samples
        assert f"{SHARD}: row {ROW_IN_SHARD} of this file, row {ROW} of train" in damaged[ROW]
        flip(corpus / SHARD, at)

    flip(corpus / SHARD, place[-1])
    others = [sample for sample in range(81) if sample not in samples]
    assert np.array_equal(open_stream(corpus).read(others), expected[others])
    with pytest.raises(ArtifactError, match=f"row {ROW} of train"):
        verify_rows_on_nodes(INLINE, corpus, CorpusManifest.read(corpus).corpus)
    if "doc_starts" in column:  # an evaluation reads starts without the checks of their rows
        with pytest.raises(ArtifactError):
            open_stream(corpus).document_begins()


def damage_the_tail(folder: Path) -> None:
    ids = CorpusRows(folder, CorpusManifest.read(folder).corpus).read("train", 80).ids
    flip(folder / TAIL, (folder / TAIL).read_bytes().index(ids.tobytes()))


def swap_rows(folder: Path) -> None:
    """Swap two rows of a shard with their checks; both have the same document starts."""
    assert 3 * LENGTH == 2 * DOCUMENT_TOKENS
    places, content = places_of_row(folder / SHARD), bytearray((folder / SHARD).read_bytes())
    for name, size in (("ids", LENGTH * 2), ("check", 8)):
        begin = places[name].start
        one, other = slice(begin, begin + size), slice(begin + 3 * size, begin + 4 * size)
        content[one], content[other] = content[other], content[one]
    (folder / SHARD).write_bytes(content)


def link_a_shard_twice(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.link(folder / shard_path("train", 0), folder / SHARD)


@pytest.mark.parametrize(
    ("change", "damaged_rows"),
    [(damage_the_tail, [80]), (swap_rows, [ROW, ROW + 3]), (link_a_shard_twice, range(32, 64))],
)
def test_an_intact_row_in_another_place_and_the_tail_are_damage_of_their_rows(
    corpus: Path, change: Callable[[Path], None], damaged_rows: Iterable[int]
) -> None:
    change(corpus)

    damaged = damaged_samples(open_stream(corpus))

    named = {int(re.findall(r"row (\d+) of train", said)[0]) for said in damaged.values()}
    assert named == set(damaged_rows)
    assert set(damaged) == {row - 1 for row in named} | named


def use(folder: Path) -> None:
    """Read a corpus as the trainer does."""
    artifact = open_artifact(folder, CorpusManifest)
    verify_files(folder, artifact.manifest)
    for split in ("train", "validation"):
        stream = TokenStream(folder, artifact.manifest.corpus, split)
        stream.read_documents(range(stream.num_samples))
        stream.document_begins()


def in_corpus(**changes: Any) -> Change:
    return lambda fields: fields["corpus"].update(changes)


def in_split(**changes: Any) -> Change:
    return lambda fields: fields["corpus"]["splits"]["train"].update(changes)


def in_vocabulary(**changes: Any) -> Change:
    return lambda fields: fields["corpus"]["vocabulary"].update(changes)


def be_of_one_document(fields: dict[str, Any]) -> None:
    in_split(documents=1, bos=1, eos=1, document_tokens=80 * 16 + 5 - 2)(fields)
    fields["corpus"]["documents_read"] -= 53


def list_no(path: str) -> Change:
    return lambda fields: fields.update(files=[entry for entry in fields["files"] if entry["path"] != path])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (in_vocabulary(path="train"), "train"),
        (list_no(SHARD), SHARD),
        (in_split(check_digests=["0" * 32] * 3), "check_digests"),
        (in_split(rows=79, tail_tokens=21), "train/shard-000002.arrow"),
        (in_split(tail_tokens=4), "train"),
        (in_corpus(documents_read=1), "documents"),
        (in_corpus(token_dtype="uint32"), shard_path("train", 0)),
        (be_of_one_document, "train"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(corpus: Path, change: Change, place: str) -> None:
    forge(corpus, change)

    with pytest.raises(ArtifactError, match=place):
        use(corpus)


def write(path: Path, tokens: pa.Array, rows: int = 32) -> None:
    """Write a shard with any tokens, whose checks fit where these can be ids, and as many documents as before."""
    starts = [[0] if row < -(-512 // DOCUMENT_TOKENS) else [] for row in range(rows)]
    if pa.types.is_unsigned_integer(tokens.type):
        write_rows(path, "train", 0, tokens.to_numpy().reshape(-1, 16), starts)
        return
    ids = pa.FixedSizeListArray.from_arrays(tokens, 16)
    columns = [ids, pa.array(starts, pa.list_(pa.int32())), pa.array([0] * rows, pa.uint64())]
    batch = pa.record_batch(columns, names=["input_ids", "doc_starts", "check"])
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)


@pytest.mark.parametrize(
    ("replace", "is_refused"),
    [
        (lambda path: write(path, pa.array([299] * 512, pa.uint16())), False),
        (lambda path: write(path, pa.array([300] * 512, pa.uint16())), True),
        (lambda path: write(path, pa.array([1] * 496, pa.uint16()), rows=31), True),
        (lambda path: write(path, pa.array([1] * 512, pa.int16())), True),
        (lambda path: path.write_bytes(b""), True),
    ],
)
def test_a_shard_with_other_content_than_its_manifest_says_is_refused(
    corpus: Path, replace: Callable[[Path], None], is_refused: bool
) -> None:
    replace(corpus / shard_path("train", 0))
    forge(corpus)

    if not is_refused:
        use(corpus)
        return
    with pytest.raises(ArtifactError, match=str(corpus)):
        use(corpus)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (in_vocabulary(vocab_size=290), "290"),
        (in_vocabulary(kind="tokenizer_json"), "tokenizer.model"),
        (lambda fields: fields["files"][0].update(sha256="0" * 64), "sha256"),
        (in_split(check_digests=["0" * 32] * 4), shard_path("train", 0)),
    ],
)
def test_verify_holds_a_manifest_against_its_files(corpus: Path, change: Change, place: str) -> None:
    verify_artifact(corpus, CorpusManifest.read(corpus), INLINE)
    forge(corpus, change)

    with pytest.raises(ArtifactError, match=place):
        verify_artifact(corpus, CorpusManifest.read(corpus), INLINE)


def test_verify_says_where_no_library_reads_the_vocabulary(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)

    with pytest.raises(DeviceError, match=r"tokenizer\.model"):
        verify_artifact(corpus, CorpusManifest.read(corpus), INLINE)


def test_a_corpus_that_lies_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path / "fsx", recipe)
    current = corpus.path.parent / CURRENT
    ((key, _),) = json.loads(current.read_text()).items()

    corpus.path.rename(corpus.path.with_name("f" * 16))
    current.write_text(json.dumps({key: "f" * 16}))
    with pytest.raises(ArtifactError, match="f" * 16):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")
