"""Other programs open a published corpus, and a trainer reads the tokens that were stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from services.common.artifacts.corpus import CorpusManifest, arrow_schema
from services.common.artifacts.corpus_rows import CorpusRows
from services.common.artifacts.files import describe_files
from services.common.artifacts.store import Artifact
from services.common.artifacts.token_stream import TokenStream
from services.tokenizer import pack
from services.tokenizer.tests.builders import (
    make_documents,
    make_text,
    publish,
    publish_documents,
    published,
    read_stream,
    run,
    write_documents,
    write_recipe,
)


def make_corpus(folder: Path, **overrides: Any) -> Path:
    """Write a recipe over 90 documents of 30 kB. Both splits of its corpus have several shards."""
    text = write_documents(folder / "text", make_documents(90, mean_bytes=350))
    settings = {"corpus__validation_fraction": 0.2, "corpus__split_bytes": 2_000, "corpus__rows_per_shard": 8}
    return write_recipe(folder, text, **settings | overrides)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact[CorpusManifest]:
    """A corpus of 200 documents in about 200 shards of 8 rows of 16 tokens."""
    documents = [*make_documents(200, mean_bytes=200), b"a", b"b", b"c"]
    settings = {"corpus__validation_fraction": 0.2, "corpus__rows_per_shard": 8}
    return publish_documents(tmp_path_factory.mktemp("corpus"), documents, **settings)


def test_shards_follow_the_schema_and_open_with_pyarrow_alone(corpus: Artifact[CorpusManifest]) -> None:
    for split, counts in corpus.manifest.corpus.splits.items():
        assert len(counts.check_digests) > 3
        *shards, _ = corpus.manifest.corpus.row_files(split)
        files = [pa.ipc.open_file(str(corpus.path / shard)) for shard in shards]
        assert [file.num_record_batches for file in files] == [1] * len(files)
        assert {file.schema for file in files} == {arrow_schema("uint16", 16)}
        rows = [file.get_batch(0).num_rows for file in files]
        assert set(rows[:-1]) == {8}
        assert sum(rows) == counts.rows
        tail = pa.ipc.open_file(str(corpus.path / split / "tail" / "tail.arrow"))
        assert tail.get_batch(0).num_rows == 1
        assert tail.schema.names == ["input_ids", "doc_starts", "check"]
        assert tail.schema.field("input_ids").type.value_type == pa.uint16()
    assert sorted(path.name for path in corpus.path.iterdir()) == ["manifest.json", "tokenizer", "train", "validation"]


def test_shards_open_with_datasets_without_our_code(
    tmp_path: Path, corpus: Artifact[CorpusManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")  # in no image, so Pants leaves this test out
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would outlive the test, and prevent forks

    folder = corpus.path
    loaded = datasets.load_dataset(
        "arrow", data_files=str(folder / "train" / "*.arrow"), split="train", cache_dir=str(tmp_path / "cache")
    )

    stream = read_stream(folder, "train")
    rows = len(stream.tokens) // 16
    assert loaded.num_rows == rows
    assert loaded["input_ids"][:] == stream.tokens[: rows * 16].reshape(rows, 16).tolist()


def test_shards_are_the_same_bytes_for_any_number_of_workers_and_tasks(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path)
    runs = {
        "one": ["--tokenizer.num_workers=1"],
        "two": ["--tokenizer.num_workers=2"],
        "four": ["--tokenizer.num_workers=4", "--corpus.split_bytes=700"],
        "whole": ["--corpus.split_bytes=1000000000"],
    }
    made = {name: publish(recipe, tmp_path / name, *arguments) for name, arguments in runs.items()}

    assert len({corpus.manifest.content_digest for corpus in made.values()}) == 1
    assert len({corpus.manifest.id for corpus in made.values()}) == 1
    # The tasks hash what they write. Nobody has read the files since.
    assert made["four"].manifest.files == describe_files(made["four"].path)


def test_what_a_lost_pack_task_has_left_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_and_run_again(task: pack.PackTask) -> pack.PackedFile:
        path = task.folder / task.path
        path.with_name(f".{path.name}.0123.tmp").write_bytes(b"half of a sh")
        assert pack_file(task) == pack_file(task)
        return pack_file(task)

    pack_file = pack.pack_file
    monkeypatch.setattr(pack, "pack_file", lose_and_run_again)
    corpus = publish(make_corpus(tmp_path), tmp_path / "fsx")
    assert not list(corpus.path.rglob("*.tmp"))
    assert corpus.manifest.files == describe_files(corpus.path)


@pytest.mark.parametrize(("kind", "damage"), [("tokens", "gone"), ("starts", "cut"), ("tokens", "zeros")])
def test_a_partition_that_is_damaged_before_it_is_packed_is_named_and_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, damage: str
) -> None:
    """A node that is lost may not have written to the disk what its finished tasks have written."""
    recipe, pack_splits = make_corpus(tmp_path), pack.pack_splits

    def pack_what_is_left(folder: Path, encoded_folder: Path, *arguments: Any) -> Any:
        damaged = encoded_folder / "000" / f"000003.train.{kind}"
        size = damaged.stat().st_size
        os.truncate(damaged, size - 8)
        if damage == "zeros":
            os.truncate(damaged, size)
        if damage == "gone":
            damaged.unlink()
        return pack_splits(folder, encoded_folder, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("services.tokenizer.build.pack_splits", pack_what_is_left)
        assert run(recipe, tmp_path / "fsx") == 3
    assert "same command" in capsys.readouterr().err
    assert run(recipe, tmp_path / "fsx") == 0
    assert run(recipe, tmp_path / "undisturbed") == 0
    made = [published(tmp_path / name).manifest.content_digest for name in ("fsx", "undisturbed")]
    assert made[0] == made[1]


@pytest.mark.parametrize("tokens_beyond", [1, 2, 15, 16, 17, 16 * 8, 16 * 8 + 1, 400])
def test_the_reader_gives_the_samples_of_a_plain_concatenation(tmp_path: Path, model: Path, tokens_beyond: int) -> None:
    """The last target of a sample may be in the next row, the next shard or the tail, or may be missing."""
    # With a token for each digit, for the space before the first one, BOS and EOS these are 16 + tokens_beyond tokens.
    digits = "".join(str(index % 7) for index in range(16 + tokens_beyond - 3)).encode()
    corpus = publish_documents(tmp_path, [digits], model=model, corpus__rows_per_shard=8)
    plain = read_stream(corpus.path, "train").tokens
    assert len(plain) == 16 + tokens_beyond

    stream = TokenStream(corpus.path, corpus.manifest.corpus, "train")

    expected = [plain[begin : begin + 17] for begin in range(0, len(plain) - 16, 16)]
    assert stream.num_samples == len(expected) >= 1
    np.testing.assert_array_equal(stream.read(range(len(expected))), np.stack(expected))
    backwards = np.arange(len(expected))[::-1]
    np.testing.assert_array_equal(stream.read(backwards), np.stack(expected)[::-1])
    assert stream.read([]).shape == (0, 17)


def test_a_split_without_documents_has_a_tail_and_no_shards(tmp_path: Path) -> None:
    corpus = publish_documents(tmp_path, [make_text(5_000)])

    counts = corpus.manifest.corpus.splits["validation"]
    assert (counts.documents, counts.rows, counts.tail_tokens, len(counts.check_digests)) == (0, 0, 0, 1)
    assert CorpusRows(corpus.path, corpus.manifest.corpus).read("validation", 0).ids.tolist() == []
    assert TokenStream(corpus.path, corpus.manifest.corpus, "validation").num_samples == 0
