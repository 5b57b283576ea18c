"""Folders that are damaged, or no corpus, are named and not shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from services.common.testing.manifests import forge, reseal
from services.tokenizer.tests.builders import read_stream
from services.tokenizer.tests.tools.corpora import MODEL, Tool, flip_a_token, lose_a_document


def cut_off(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-100])


def zero(shard: Path) -> None:
    shard.write_bytes(bytes(shard.stat().st_size))


def move_starts(shard: Path) -> None:
    """Documents that begin outside of the shard, in a file of the same size."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts")
    moved = pa.ListArray.from_arrays(
        starts.offsets, pa.array(starts.values.to_numpy() + 10_000), type=batch.schema.field("doc_starts").type
    )
    rewritten = pa.record_batch([batch.column("input_ids"), moved], schema=batch.schema)
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(rewritten)


def begin_late(shard: Path) -> None:
    """The first document does not begin where the tokens do."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts").to_pylist()
    starts[0][0] += 1
    moved = pa.array(starts, batch.schema.field("doc_starts").type)
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(pa.record_batch([batch.column("input_ids"), moved], schema=batch.schema))


def misplace_a_list(shard: Path) -> None:
    """A file whose doc_starts point far beyond its end."""
    batch = pa.ipc.open_file(str(shard)).get_batch(0)
    starts = batch.column("doc_starts")
    offsets = starts.offsets.to_numpy().copy()
    offsets[2:-1] = 1_000_000
    misplaced = pa.Array.from_buffers(starts.type, len(starts), [None, pa.py_buffer(offsets)], children=[starts.values])
    with pa.ipc.new_file(str(shard), batch.schema) as writer:
        writer.write_batch(pa.record_batch([batch.column("input_ids"), misplaced], schema=batch.schema))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (Path.unlink, ["train/shard-00001.arrow: missing", "run the stage again"]),
        (cut_off, ["train/shard-00001.arrow", "bytes, the manifest says", "run the stage again"]),
        (zero, ["train/shard-00001.arrow: cannot be read", "artifacts verify"]),
        (misplace_a_list, ["train/shard-00001.arrow: cannot be read", "artifacts verify"]),
        (move_starts, ["train/shard-00001.arrow: its doc_starts", "artifacts verify"]),
    ],
)
def test_a_damaged_folder_is_named_and_not_shown(
    copy: Path, tool: Tool, damage: Callable[[Path], None], expected: list[str]
) -> None:
    assert tool("inspect", copy).exit_code == 0
    damage(copy / "train" / "shard-00001.arrow")
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert all(part in said.errors for part in expected), said.errors
    assert "⟨BOS⟩" not in said.output


def test_the_first_token_begins_a_document(copy: Path, tool: Tool) -> None:
    begin_late(copy / "train" / "shard-00000.arrow")
    forge(copy)
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert "train/shard-00000.arrow: its first token begins no document" in said.errors


def test_documents_are_counted(copy: Path, tool: Tool) -> None:
    lose_a_document(copy / "train" / "shard-00001.arrow")
    forge(copy)
    number = len(read_stream(copy, "train").starts)
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert f"{number:,} documents begin, the manifest says {number + 1:,}" in said.errors


def test_another_vocabulary_file_than_the_manifests_decodes_nothing(copy: Path, tool: Tool) -> None:
    content = bytearray((copy / MODEL).read_bytes())
    content[1_000] ^= 1
    (copy / MODEL).write_bytes(content)
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert f"{MODEL}: xxh3-128 is" in said.errors


def test_an_id_that_is_not_in_the_vocabulary_is_named(copy: Path, tool: Tool) -> None:
    flip_a_token(copy / "train" / "shard-00000.arrow", 5, 60_000)
    said = tool("inspect", copy, "--documents", "1000")

    assert said.exit_code == 3
    assert "60000" in said.errors
    assert "artifacts verify" in said.errors


@pytest.mark.parametrize("arguments", [["inspect"], ["diff", "."]])
def test_a_folder_that_is_no_corpus_is_refused(tmp_path: Path, tool: Tool, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "manifest.json").write_text('{"schema": "corpus/2", ')
    for folder, expected in {
        tmp_path / "missing": "not a published artifact",
        tmp_path / "file": "not a published artifact",
        tmp_path / "folder": "not a published artifact",
        torn: "damaged: not a sealed manifest",
    }.items():
        said = tool(arguments[0], folder, *[folder for _ in arguments[1:]])
        assert (said.exit_code, expected in said.errors) == (3, True), said.errors


@pytest.mark.parametrize("schema", ["checkpoint/1", "corpus/9"])
def test_an_artifact_of_another_schema_is_refused(copy: Path, tool: Tool, schema: str) -> None:
    reseal(copy, lambda fields: fields.update(schema=schema))
    said = tool("inspect", copy)

    assert said.exit_code == 3
    assert f"schema '{schema}', this program reads 'corpus/2'" in said.errors
