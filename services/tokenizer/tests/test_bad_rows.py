"""Rows that hold no document end the stage, or are skipped and counted, the same ones by all readers of the text."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import BadRowReason
from services.common.artifacts.lock import hold_lock
from services.common.errors import ArtifactError
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.tests.builders import (
    Stage,
    decode_documents,
    jsonl,
    make_documents,
    publish,
    published,
    read_all,
    stop,
    write_jsonl,
    write_recipe,
)

LIMIT = 5_000
GOOD = [document.decode() for document in make_documents(20)]


def lines(*texts: str) -> list[bytes]:
    return jsonl(texts).splitlines(keepends=True)


BAD_LINES: dict[bytes, BadRowReason] = {
    b'{"text": "cut of\n': "not JSON",
    b"plain text\n": "not JSON",
    b"\x00\xff\n": "not JSON",
    b"1" * 4_400 + b"\n": "not JSON",  # a number that Python does not convert
    b"[" * 2_000 + b"\n": "not JSON",
    b'["text"]\n': "not an object",
    b"7\n": "not an object",
    b'{"text": 1}\n': "not text",
    b'{"text": ["a"]}\n': "not text",
    b'{"text": "%s"}\n' % (b"x" * LIMIT): "too long",
    b"x" * (3 * LIMIT) + b"\r\n": "too long",
}


LIMITED: dict[str, Any] = {"corpus__max_document_bytes": LIMIT}
SKIP: dict[str, Any] = {"corpus__bad_rows": "skip", **LIMITED}
BAD_ELEMENTS: dict[bytes, BadRowReason] = {
    b"7": "not an object",
    b'["text"]': "not an object",
    b'{"text": 1}': "not text",
    b'{"text": {"a": "b"}}': "not text",
    b'{"text": "%s"}' % (b"x" * 3 * 2**20): "too long",  # in several blocks
}


def array(rows: list[bytes]) -> bytes:
    return b"[" + b",\n ".join(row.strip() for row in rows) + b"]\n"


@pytest.mark.parametrize(
    ("bad", "reason", "is_array"),
    [
        *((bad, reason, False) for bad, reason in BAD_LINES.items()),
        *((bad, reason, True) for bad, reason in BAD_ELEMENTS.items()),
    ],
)
def test_a_bad_row_is_an_error_or_skipped_and_counted(
    tmp_path: Path, bad: bytes, reason: BadRowReason, is_array: bool
) -> None:
    path, rows = tmp_path / "a.json.gz", [*lines(*GOOD[:7]), bad, *lines(*GOOD[7:])]
    content = array(rows) if is_array else b"".join(rows)
    path.write_bytes(gzip.compress(content))
    source, place = Source(uri=str(path)), f"{path}: element 8: " if is_array else f"{path}:8: "

    with pytest.raises(ArtifactError, match=re.escape(place)):
        read_all(source, max_document_bytes=LIMIT)
    bad_rows = BadRows("skip")
    assert read_all(source, max_document_bytes=LIMIT, bad_rows=bad_rows) == GOOD
    [file] = bad_rows.files()
    assert (file.uri, file.rows) == (str(path), {reason: 1})
    assert file.first.startswith(place)


def test_bad_lines_end_the_stage_or_are_counted_in_the_manifest(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join([*BAD_LINES, *lines(*GOOD)]))

    assert "a.jsonl:1" in stage.refuse(3, path, **LIMITED)

    assert stage.run(path, **SKIP) == 0
    corpus = published(tmp_path / "fsx")
    assert [text.decode() for text in decode_documents(corpus.path, "train")] == GOOD
    [file] = corpus.manifest.corpus.bad_files
    assert (file.uri, corpus.manifest.corpus.bad_rows) == (str(path), file.rows)
    assert file.rows == Counter(BAD_LINES.values())
    assert corpus.manifest.corpus.documents_read == len(GOOD)


def test_rows_of_a_data_set_above_the_limit_are_skipped(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("\n".join([*GOOD[:4], "x" * (LIMIT + 1), *GOOD[4:]]))
    source = {"uri": f"datasets://{tmp_path / 'set'}", "split": "train"}
    stage.refuse(3, source, **LIMITED)
    assert stage.run(source, **SKIP) == 0
    corpus = published(tmp_path / "fsx").manifest.corpus
    assert (corpus.bad_rows, corpus.documents_read) == ({"too long": 1}, sum(len(text.split("\n")) for text in GOOD))


def write_four(folder: Path, *, bad: int) -> list[Path]:
    """Write four files of lines, with bad lines in the third and half as many in the fourth."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.jsonl" for name in "abcd"]
    for number, path in enumerate(paths):
        content = lines(*(f"{number} {text}" for text in GOOD))
        for row in range(0, 2 * (bad // (number - 1) if number > 1 else 0), 2):
            content.insert(row, list(BAD_LINES)[row % len(BAD_LINES)])
        path.write_bytes(b"".join(content))
    return paths


def test_above_the_limit_the_worst_files_are_named(stage: Stage, tmp_path: Path) -> None:
    paths = write_four(tmp_path / "text", bad=8)

    errors = stage.refuse(3, tmp_path / "text", corpus__max_bad_rows=11, **SKIP)
    assert errors.index(f"8 in {paths[2]}") < errors.index(f"4 in {paths[3]}")
    assert stage.run(tmp_path / "text", corpus__max_bad_rows=12, **SKIP) == 0
    assert [file.num_rows for file in published(tmp_path / "fsx").manifest.corpus.bad_files] == [8, 4]


def test_all_readers_skip_the_same_rows_for_any_workers_and_partitions(tmp_path: Path) -> None:
    """The vocabulary is trained on the text, duplicates are dropped, and a source is read three times."""
    write_four(tmp_path / "text", bad=10)
    source = {"uri": str(tmp_path / "text"), "weight": 2.5}
    half = {"uri": str(write_jsonl(tmp_path / "half.jsonl", make_documents(60, seed=1))), "weight": 0.5}
    made = []
    for workers, split_bytes in ((1, 10**9), (1, 700), (2, 8_000)):
        recipe = write_recipe(
            tmp_path,
            source,
            half,
            corpus__split_bytes=split_bytes,
            corpus__validation_fraction=0.2,
            corpus__min_document_bytes=100,
            corpus__duplicates="drop",
            tokenizer__num_workers=workers,
            **SKIP,
        )
        made.append(publish(recipe, tmp_path / f"fsx-{split_bytes}").manifest)

    assert len({(manifest.id, manifest.content_digest) for manifest in made}) == 1
    for counts in ("bad_rows", "bad_files", "sources"):
        first, *others = [getattr(manifest.corpus, counts) for manifest in made]
        assert others == [first] * 2
    assert made[0].corpus.num_bad_rows == 15
    assert made[0].corpus.documents_read == 4 * len(GOOD) + 60


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the files of each partition that is encoded in this process, in order."""
    from services.tokenizer import encode_task  # noqa: PLC0415

    names: list[list[str]] = []
    original: Callable[..., Any] = encode_task._encode

    def encode_and_record(task: Any, partition: Any, *arguments: Any) -> Any:
        result = original(task, partition, *arguments)
        names.append([Path(each.file.uri).name for each in partition.file_ranges])
        return result

    monkeypatch.setattr(encode_task, "_encode", encode_and_record)
    return names


def scratches(root: Path) -> list[Path]:
    return sorted(root.glob("corpus/*/*.scratch"))


@pytest.mark.parametrize("is_other_running", [False, True])
def test_only_the_file_that_was_mended_or_added_is_encoded_again(
    stage: Stage, tmp_path: Path, encoded: list[list[str]], is_other_running: bool
) -> None:
    """What the stopped command has left is removed, unless a command still uses it."""
    paths, root = write_four(tmp_path / "text", bad=0), tmp_path / "fsx"
    mended = paths[1].read_bytes()
    paths[1].write_bytes(mended[:-300] + b"\n")  # the smallest file is encoded last
    assert stage.run(tmp_path / "text") == 3
    assert sorted(encoded) == [["a.jsonl"], ["c.jsonl"], ["d.jsonl"]]
    [stopped] = scratches(root)
    left = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}

    encoded.clear()
    paths[1].write_bytes(mended)
    (tmp_path / "text" / "e.jsonl").write_bytes(b"".join(lines("added")))
    with hold_lock(stopped.with_suffix(".lock")) if is_other_running else nullcontext():
        assert stage.run(tmp_path / "text") == 0
    assert sorted(encoded) == [["b.jsonl"], ["e.jsonl"]]
    assert scratches(root) == ([stopped] if is_other_running else [])
    if is_other_running:
        assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == left
    made = published(root).manifest.content_digest
    assert publish(tmp_path / "small.toml", tmp_path / "undisturbed").manifest.content_digest == made


def test_kept_partitions_are_used_by_the_next_corpus_and_removed_with_it(
    stage: Stage, tmp_path: Path, encoded: list[list[str]]
) -> None:
    write_four(tmp_path / "text", bad=2)
    keep: dict[str, Any] = {"tokenizer__keep_encoded": True, **SKIP}
    assert stage.run(tmp_path / "text", **keep) == 0
    assert len(encoded) == 4
    assert len(scratches(tmp_path / "fsx")) == 1

    for number, (added, kept) in enumerate([(keep, 1), (SKIP, 0)]):
        encoded.clear()
        (tmp_path / "text" / f"e{number}.jsonl").write_bytes(b"".join(lines("added")))
        assert stage.run(tmp_path / "text", **added) == 0
        assert encoded == [[f"e{number}.jsonl"]]
        assert len(scratches(tmp_path / "fsx")) == kept


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"corpus__rows_per_shard": 300}, ""),
        ({"corpus__validation_fraction": 0.3}, "abcd"),
        ({"corpus__duplicates": "drop"}, "b"),
    ],
)
def test_a_partition_is_used_again_where_its_bytes_are_the_same(
    stage: Stage,
    tmp_path: Path,
    encoded: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    again: str,
) -> None:
    """The first command is stopped when all is encoded; file b has a document of file a."""
    paths = write_four(tmp_path / "text", bad=0)
    paths[1].write_bytes(paths[1].read_bytes() + paths[0].read_bytes().splitlines(keepends=True)[3])
    with monkeypatch.context() as patch:
        patch.setattr("services.tokenizer.build.pack_splits", stop)
        assert stage.run(tmp_path / "text") == 75
    assert sorted(encoded) == [["a.jsonl"], ["b.jsonl"], ["c.jsonl"], ["d.jsonl"]]
    encoded.clear()

    assert stage.run(tmp_path / "text", **change) == 0
    assert sorted(encoded) == [[f"{name}.jsonl"] for name in again]
    made = published(stage.root).manifest.content_digest
    assert publish(tmp_path / "small.toml", tmp_path / "undisturbed").manifest.content_digest == made
