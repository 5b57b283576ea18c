"""A corpus that another program wrote is checked before the trainer believes it."""

from __future__ import annotations

import json
import os
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
from services.common.errors import ArtifactError
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.entry_point import exit_code_of
from services.common.testing.manifests import forge
from services.trainer.tests.builders import DOCUMENT_TOKENS, make_corpus, make_recipe, write_rows

ALONE = WorkerEnvironment(rank=0, world_size=1)
SHARD = "train/shard-000000.arrow"
TAIL = "train/tail/tail.arrow"

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


def be_made_of(uri: str, weight: float, extra_bytes: int = 0) -> Change:
    """The corpus says that all of it comes from this source."""

    def change(fields: dict[str, Any]) -> None:
        splits = {
            name: {
                "documents": counts["documents"],
                "tokens": counts["documents"] * 2 + counts["document_tokens"],
                "text_bytes": counts["text_bytes"] + extra_bytes,
            }
            for name, counts in fields["corpus"]["splits"].items()
        }
        others = {"documents_duplicate": 0, "validation_ngrams": 10, "validation_ngrams_in_train": 2}
        in_corpus(sources=[{"uri": uri, "weight": weight, "share": 1.0, "splits": splits, **others}])(fields)

    return change


def list_no(path: str) -> Change:
    return lambda fields: fields.update(files=[entry for entry in fields["files"] if entry["path"] != path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_vocabulary(path="../../../tokenizer.model"), "is no path below the artifact's folder"),
        (in_vocabulary(path="/etc/passwd"), "is no path below the artifact's folder"),
        (in_vocabulary(path="train"), "train: not among the files that the manifest lists"),
        (list_no("tokenizer/tokenizer.model"), "tokenizer.model: not among the files that the manifest lists"),
        (list_no(SHARD), f"{SHARD}: not among the files that the manifest lists"),
        (list_no(TAIL), f"{TAIL}: not among the files that the manifest lists"),
        (in_vocabulary(path=SHARD), f"{SHARD}: named both as the vocabulary and as a file of rows"),
        (in_split(check_digests=["0" * 32] * 3), "80 rows in shards of 32, and check_digests of 3 files"),
        (in_split(check_digests=[]), "80 rows in shards of 32, and check_digests of 0 files"),
        (in_split(check_digests=["0" * 31] * 4), "check_digests.*String should match pattern"),
        (in_vocabulary(sha256="0" * 64), "tokenizer.model: sha256 000000000000, `files` has "),
        (be_made_of("elsewhere/*.jsonl", 1.0), "elsewhere.*nowhere"),
        (be_made_of("pydoc://", 2.0), "2.0.*1.0"),
        (be_made_of("nowhere", 1.0, extra_bytes=1), "train: .* text_bytes"),
        (in_split(rows=79, tail_tokens=21), "256 tokens of uint16 in 16 rows, the manifest says 240 of uint16 in 15"),
        (in_split(rows=80, tail_tokens=6, document_tokens=1_178), "the manifest says 6 of uint16 in 1"),
        (in_split(rows=2**70), "rows: Input should be less than"),
        (in_split(rows=-1), "rows: Input should be greater than or equal to 0"),
        (in_corpus(rows_per_shard=80), "80 rows in shards of 80, and check_digests of 4 files"),
        (in_corpus(sequence_length=0), "sequence_length: Input should be greater than or equal to 1"),
        (in_corpus(token_dtype="uint32"), "tokens of uint16 in 32 rows, the manifest says 512 of uint32 in 32"),
        (in_corpus(splits={}), "splits: none, expected train and validation"),
        (in_vocabulary(bos_id=300), "bos_id 300 or eos_id 2 is not below vocab_size 300"),
        (in_vocabulary(vocab_size=290), "and its vocabulary has 290"),
        (in_vocabulary(vocab_size=70_000), "70,000 ids do not fit into uint16"),
        (in_split(documents=1), "1 documents with 54 BOS and 54 EOS"),
        (be_of_one_document, "54 documents begin in its files, the manifest says 1"),
        (in_corpus(documents_with_invalid_utf8=200), "200 of 108 documents with invalid UTF-8"),
        (
            lambda fields: fields["recipe"]["corpus"].update(sequence_length=99),
            "corpus.sequence_length: 16, .*99",
        ),
        (lambda fields: fields["recipe"]["corpus"].pop("rows_per_shard"), "corpus.rows_per_shard: 32, .*None"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(corpus: Path, change: Change, message: str) -> None:
    forge(corpus, change)

    with pytest.raises(ArtifactError, match=message):
        use(corpus)


def write(path: Path, tokens: pa.Array, starts: list[list[int]], batches: int = 1) -> None:
    """Write the training split's first shard with any tokens, whose checks fit where they can be ids."""
    if tokens.null_count == 0 and pa.types.is_unsigned_integer(tokens.type):
        write_rows(path, "train", 0, tokens.to_numpy().reshape(-1, 16), starts, batches)
        return
    rows = pa.FixedSizeListArray.from_arrays(tokens, 16)
    columns = [rows, pa.array(starts, pa.list_(pa.int32())), pa.array([0] * len(starts), pa.uint64())]
    batch = pa.record_batch(columns, names=["input_ids", "doc_starts", "check"])
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)


DOCUMENTS = -(-512 // DOCUMENT_TOKENS)
"""Documents that begin in the training split's first shard, of 32 rows of 16 tokens."""


def make_starts(rows: int = 32, documents: int = DOCUMENTS) -> list[list[int]]:
    """Return begins of documents: as many as in the replaced shard, one in each of the first rows."""
    return [[0] if row < documents else [] for row in range(rows)]


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda path: write(path, pa.array([299] * 512, pa.uint16()), make_starts()), None),
        (
            lambda path: write(path, pa.array([300] * 512, pa.uint16()), make_starts()),
            "has the id 300, and its vocabulary has 300",
        ),
        (
            lambda path: write(path, pa.array([1] * 496, pa.uint16()), make_starts(31)),
            "496 tokens of uint16 in 31 rows, the manifest says 512 of uint16 in 32",
        ),
        (lambda path: write(path, pa.array([1] * 512, pa.int16()), make_starts()), "512 tokens of int16"),
        (lambda path: write(path, pa.array([1.0] * 512), make_starts()), "512 tokens of float64"),
        (lambda path: write(path, pa.array([1] * 511 + [None], pa.uint16()), make_starts()), "cannot be read as"),
        (lambda path: write(path, pa.array([1] * 512, pa.uint16()), make_starts(), 2), "2 record batches"),
        (
            lambda path: write(path, pa.array([1] * 512, pa.uint16()), [[16], *make_starts(31, DOCUMENTS - 1)]),
            "the doc_starts of row 0 do not rise within the row",
        ),
        (
            lambda path: write(path, pa.array([1] * 512, pa.uint16()), [[3, 3], *make_starts(31, DOCUMENTS - 2)]),
            "the doc_starts of row 0 do not rise within the row",
        ),
        (lambda path: path.write_bytes(b"ARROW1\0\0" + bytes(200)), "cannot be read as a corpus's file"),
        (lambda path: path.write_bytes(b""), "cannot be read as a corpus's file"),
    ],
)
def test_a_shard_with_other_content_than_its_manifest_says_is_refused(
    corpus: Path, replace: Callable[[Path], None], message: str | None
) -> None:
    replace(corpus / SHARD)
    forge(corpus)

    if message is None:
        use(corpus)
        return
    with pytest.raises(ArtifactError, match=message):
        use(corpus)


def verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and messages of `python -m services.common.artifacts verify`."""
    from services.common.artifacts.__main__ import main as artifacts  # noqa: PLC0415

    return exit_code_of(lambda: artifacts(["verify", str(folder)])), capsys.readouterr().err


def test_verify_counts_what_a_corpus_holds(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(corpus, capsys) == (0, "")

    write(corpus / SHARD, pa.array([1] * 496, pa.uint16()), make_starts(31))
    forge(corpus)

    exit_code, told = verify(corpus, capsys)
    assert exit_code == 3
    assert "496 tokens of uint16 in 31 rows" in told


def be_the_shards_vocabulary(fields: dict[str, Any]) -> None:
    """The manifest lists one more file, which is no vocabulary, and takes it for one."""
    other = next(entry for entry in fields["files"] if entry["path"] == "notes.txt")
    in_vocabulary(path=other["path"], sha256=other["sha256"])(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_vocabulary(vocab_size=290), "and its vocabulary has 290"),
        (in_vocabulary(kind="tokenizer_json"), "tokenizer.model is no tokenizer_json vocabulary"),
        (in_vocabulary(kind="tiktoken"), "tokenizer.model: "),
        (be_the_shards_vocabulary, "notes.txt is no sentencepiece vocabulary"),
        (lambda fields: fields.update(identity_key="0" * 64), "identity_key 000000000000"),
        (lambda fields: fields["recipe"]["corpus"].update(validation_fraction=0.5), "identity_key "),
        (lambda fields: fields["recipe"].update(surprise=1), "cannot read the recipe in its manifest: surprise"),
        (lambda fields: fields["files"][0].update(sha256="0" * 64), "the manifest says " + "0" * 64),
        (lambda fields: fields.update(name="other"), "name other, its recipe has sentences"),
    ],
)
def test_verify_holds_a_manifest_against_its_vocabulary_and_its_recipe(
    corpus: Path, capsys: pytest.CaptureFixture[str], change: Change, said: str
) -> None:
    (corpus / "notes.txt").write_text("no vocabulary", encoding="utf-8")
    forge(corpus, change)

    exit_code, told = verify(corpus, capsys)

    assert (exit_code, said in told) == (3, True), told


def test_verify_says_where_no_library_reads_the_vocabulary(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)

    exit_code, told = verify(corpus, capsys)

    assert exit_code == 4
    assert "tokenizer.model: this environment cannot read a sentencepiece vocabulary" in told


def test_verify_takes_a_copy_under_a_name_of_ones_own_and_none_under_another_id(
    published: Artifact[CorpusManifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("my-copy", "0" * 16):
        shutil.copytree(published.path, tmp_path / name)

    assert verify(tmp_path / "my-copy", capsys) == (0, "")
    exit_code, told = verify(tmp_path / ("0" * 16), capsys)
    assert exit_code == 3
    assert f"the manifest has the id {published.manifest.id}" in told


def test_the_file_behind_a_link_is_not_mapped(corpus: Path, tmp_path: Path) -> None:
    """Workers map the files without hashing them once more."""
    artifact = open_artifact(corpus, CorpusManifest)
    (corpus / SHARD).rename(tmp_path / "shard")
    (corpus / SHARD).symlink_to(tmp_path / "shard")

    with pytest.raises(ArtifactError, match="a link that leads out of "):
        TokenStream(corpus, artifact.manifest.corpus, "train").read([0])


def test_a_corpus_that_lies_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path / "fsx", recipe)
    current = corpus.path.parent / CURRENT
    ((key, _),) = json.loads(current.read_text()).items()

    corpus.path.rename(corpus.path.with_name("f" * 16))
    current.write_text(json.dumps({key: "f" * 16}))
    with pytest.raises(ArtifactError, match=r"name and id sentences/"):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")

    corpus.path.with_name("f" * 16).rename(corpus.path)
    forge(corpus.path, lambda fields: fields.update(identity_key="0" * 64))
    current.write_text(json.dumps({key: corpus.path.name}))
    with pytest.raises(ArtifactError, match=r"current\.json: names .* for another recipe"):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")


@pytest.mark.parametrize(
    "content",
    ["[]", "5", "{", '{"a": "../../x"}', '{"a": 5}', '{"a": ["x"]}', '{"a": "' + "x" * 5_000 + '"}', "[" * 9_999],
)
def test_a_current_json_that_names_no_published_artifact_is_made_anew(tmp_path: Path, content: str) -> None:
    recipe = make_recipe(tmp_path)
    corpus = make_corpus(tmp_path / "fsx", recipe)
    shutil.copytree(corpus.path, tmp_path / "x")
    (corpus.path.parent / CURRENT).write_text(content)

    assert open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx").path == corpus.path


@pytest.mark.parametrize("replace", [Path.mkdir, os.mkfifo])
def test_a_current_json_that_is_no_file_is_named(tmp_path: Path, replace: Callable[[Path], None]) -> None:
    recipe = make_recipe(tmp_path)
    current = make_corpus(tmp_path / "fsx", recipe).path.parent / CURRENT
    current.unlink()
    replace(current)

    with pytest.raises(ArtifactError, match=r"current\.json: cannot be read"):
        open_corpus(recipe, tmp_path / "small.toml", tmp_path / "fsx")
