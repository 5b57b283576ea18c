"""A damaged row is named and ends all workers that would use it; a manifest that its files do not fit is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from operator import getitem
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
from services.trainer.data import sample_indices
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_recipe, write_recipe, write_rows
from services.trainer.tests.runs import call_trainer, checkpoints, read_run, state_hash, train_alone

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
            open_stream(corpus).document_starts()


def place_of_ids(folder: Path, shard: Path, row: int) -> int:
    ids = CorpusRows(folder, CorpusManifest.read(folder).corpus).read("train", row).ids
    return shard.read_bytes().index(ids.tobytes())


def damage_the_tail(folder: Path) -> None:
    flip(folder / TAIL, place_of_ids(folder, folder / TAIL, 80))


def swap_rows(folder: Path) -> None:
    """Swap two rows of a shard with their checks; both have the same document starts."""
    assert 3 * LENGTH == 2 * DOCUMENT_TOKENS
    places, content = places_of_row(folder / SHARD), bytearray((folder / SHARD).read_bytes())
    for name, size in (("ids", LENGTH * 2), ("check", 8)):
        begin = places[name].start
        one, other = slice(begin, begin + size), slice(begin + 3 * size, begin + 4 * size)
        content[one], content[other] = content[other], content[one]
    (folder / SHARD).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "damaged_rows"),
    [(damage_the_tail, [80]), (swap_rows, [ROW, ROW + 3])],
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
        stream.document_starts()


def verify(folder: Path) -> None:
    verify_artifact(folder, CorpusManifest.read(folder), INLINE)


def set_fields(*part: str, **changes: Any) -> Change:
    return lambda fields: reduce(getitem, part, fields["corpus"]).update(changes)


def list_no(path: str) -> Change:
    return lambda fields: fields.update(files=[entry for entry in fields["files"] if entry["path"] != path])


@pytest.mark.parametrize(
    ("check", "change", "place"),
    [
        (use, set_fields("vocabulary", path="train"), "train"),
        (use, list_no(SHARD), SHARD),
        (use, set_fields("splits", "train", check_digests=["0" * 32] * 3), "check_digests"),
        (use, set_fields("splits", "train", rows=79, tail_tokens=21), "train/shard-000002.arrow"),
        (use, set_fields("splits", "train", tail_tokens=4), "train"),
        (use, set_fields(documents_read=1), "documents"),
        (use, set_fields(token_dtype="uint32"), shard_path("train", 0)),
        (verify, set_fields("vocabulary", vocab_size=290), "290"),
        (verify, set_fields("vocabulary", kind="tokenizer_json"), "tokenizer.model"),
        (verify, lambda fields: fields["files"][0].update(sha256="0" * 64), "sha256"),
        (verify, set_fields("splits", "train", check_digests=["0" * 32] * 4), shard_path("train", 0)),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(
    corpus: Path, check: Callable[[Path], None], change: Change, place: str
) -> None:
    check(corpus)
    forge(corpus, change)

    with pytest.raises(ArtifactError, match=place):
        check(corpus)


def write(path: Path, token: int, rows: int = 32, dtype: str = "uint16") -> None:
    """Write a shard of one token, whose checks fit, with as many documents as before."""
    starts = [[0] if row < -(-512 // DOCUMENT_TOKENS) else [] for row in range(rows)]
    write_rows(path, "train", 0, np.full((rows, LENGTH), token, dtype), starts)


@pytest.mark.parametrize(
    ("replace", "is_refused"),
    [
        (lambda path: write(path, 299), False),
        (lambda path: write(path, 300), True),
        (lambda path: write(path, 1, rows=31), True),
        (lambda path: write(path, 1, dtype="uint32"), True),
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


def test_verify_says_where_no_library_reads_the_vocabulary(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "services.common.vocabularies.sentencepiece_model", raising=False)

    with pytest.raises(DeviceError, match=r"tokenizer\.model"):
        verify(corpus)


def test_a_corpus_that_lies_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path / "fsx", recipe)
    current = corpus.path.parent / CURRENT
    ((key, _),) = json.loads(current.read_text()).items()

    corpus.path.rename(corpus.path.with_name("f" * 16))
    current.write_text(json.dumps({key: "f" * 16}))
    with pytest.raises(ArtifactError, match="f" * 16):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")


BATCH, STEPS = 8, 9
OPTIONS = (f"--train.max_steps={STEPS}", "--train.evaluation_tokens=0", "--checkpoint.interval_steps=2")
"""Nine steps of two workers, which use most of the 80 rows. The save after step 6 waits for that after step 4."""


def row_first_used_by_rank_1(corpus: Artifact[CorpusManifest], step: int) -> int:
    """Return a row that this step is the first to use, and in it the second of two workers alone.

    A sample uses its row and the next one, for the last target.
    """
    samples = sample_indices(corpus.manifest.corpus.num_samples("train"), 0, 0, step * BATCH)
    *others, own = np.split(samples, 2 * step)
    used = np.concatenate(others)
    return next(int(row) for row in own if row not in {*used, *(used + 1)})


def test_a_row_that_one_worker_finds_damaged_ends_all_and_the_run_goes_on_once_it_is_restored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, straight = write_recipe(tmp_path), tmp_path / "straight"
    corpus = make_corpus(tmp_path / "fsx", make_recipe(tmp_path))
    make_corpus(straight, make_recipe(tmp_path))
    assert train_alone(capfd, recipe, straight, *OPTIONS)[0] == 0
    row = row_first_used_by_rank_1(corpus, step=7)
    shard = corpus.path / shard_path("train", row // 32)
    place = place_of_ids(corpus.path, shard, row)
    flip(shard, place)

    exit_code, output = call_trainer(capfd, recipe, tmp_path / "fsx", *OPTIONS, "--launch=inline")

    assert exit_code == 3, output
    assert re.search(rf"{shard}.* row {row % 32} .* row {row} ", output)
    # The record of step 6 may be missing: worker 0 writes it while worker 1 already reads the rows of step 7.
    assert [each["step"] for each in read_run(tmp_path / "fsx").records] in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    newest = [*checkpoints(tmp_path / "fsx")][-1]
    assert newest >= "step-00000004"

    flip(shard, place)
    assert call_trainer(capfd, recipe, tmp_path / "fsx", *OPTIONS, "--launch=inline")[0] == 0
    resumed = read_run(tmp_path / "fsx")
    assert resumed.starts[-1].endswith(newest)
    assert {each["step"]: each["loss"] for each in resumed.records} == dict(enumerate(read_run(straight).losses, 1))
    last = f"step-{STEPS:08d}"
    assert state_hash(checkpoints(tmp_path / "fsx")[last]) == state_hash(checkpoints(straight)[last])
