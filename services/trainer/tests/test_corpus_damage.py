"""A corpus whose manifest, files and place do not fit together is refused, also where each byte fits its checksum."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import verify_files
from services.common.artifacts.store import CURRENT, Artifact, open_artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.artifacts.upstream import open_corpus
from services.common.artifacts.verification import verify_artifact
from services.common.errors import ArtifactError, DeviceError
from services.common.launch.launcher import choose_launcher
from services.common.testing.manifests import forge
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_recipe, write_rows

SHARD = "train/shard-000000.arrow"
INLINE = choose_launcher("inline")

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    folder = tmp_path_factory.mktemp("published")
    return make_corpus(folder / "fsx", make_recipe(folder))


@pytest.fixture
def corpus(published: Artifact[CorpusManifest], tmp_path: Path) -> Path:
    """Copy the published corpus, so that a test can change it."""
    return Path(shutil.copytree(published.path, tmp_path / "corpus"))


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
        (in_corpus(token_dtype="uint32"), SHARD),
        (be_of_one_document, "train"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(corpus: Path, change: Change, place: str) -> None:
    forge(corpus, change)

    with pytest.raises(ArtifactError, match=place):
        use(corpus)


def write(path: Path, tokens: pa.Array, starts: list[list[int]]) -> None:
    """Write the training split's first shard with any tokens, whose checks fit where they can be ids."""
    if pa.types.is_unsigned_integer(tokens.type):
        write_rows(path, "train", 0, tokens.to_numpy().reshape(-1, 16), starts)
        return
    rows = pa.FixedSizeListArray.from_arrays(tokens, 16)
    columns = [rows, pa.array(starts, pa.list_(pa.int32())), pa.array([0] * len(starts), pa.uint64())]
    batch = pa.record_batch(columns, names=["input_ids", "doc_starts", "check"])
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)


def make_starts(rows: int = 32, documents: int = -(-512 // DOCUMENT_TOKENS)) -> list[list[int]]:
    """Return begins of documents: as many as in the replaced shard, one in each of the first rows."""
    return [[0] if row < documents else [] for row in range(rows)]


@pytest.mark.parametrize(
    ("replace", "is_refused"),
    [
        (lambda path: write(path, pa.array([299] * 512, pa.uint16()), make_starts()), False),
        (lambda path: write(path, pa.array([300] * 512, pa.uint16()), make_starts()), True),
        (lambda path: write(path, pa.array([1] * 496, pa.uint16()), make_starts(31)), True),
        (lambda path: write(path, pa.array([1] * 512, pa.int16()), make_starts()), True),
        (lambda path: path.write_bytes(b""), True),
    ],
)
def test_a_shard_with_other_content_than_its_manifest_says_is_refused(
    corpus: Path, replace: Callable[[Path], None], is_refused: bool
) -> None:
    replace(corpus / SHARD)
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
        (in_split(check_digests=["0" * 32] * 4), SHARD),
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
