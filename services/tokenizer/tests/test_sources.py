"""The same documents give the same tokens in all file formats, and for all sizes of partitions."""

from __future__ import annotations

import bz2
import io
import json
import logging
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Source
from services.tokenizer.corpus_inputs import list_corpus_inputs
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.builders import (
    PIECES,
    decode_documents,
    make_documents,
    published,
    run,
    write_documents,
    write_recipe,
)
from services.tokenizer.tests.plans import plan_in
from services.tokenizer.tests.stored_documents import DOCUMENTS, read_all, write_gzip, write_jsonl, write_parquet


def write_raw_jsonl(path: Path) -> None:
    """Write characters without escapes, blank lines, and no line end behind the last line."""
    lines = "\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in DOCUMENTS)
    path.write_text(lines, encoding="utf-8")


def write_compressed(path: Path, codec: str) -> None:
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in DOCUMENTS).encode()
    with pa.CompressedOutputStream(str(path), codec) as file:
        file.write(lines)


def write_two_bzip2_streams(path: Path) -> None:
    """Write two streams in one file, as pbzip2 does."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in DOCUMENTS]
    path.write_bytes(bz2.compress(b"".join(lines[:30])) + bz2.compress(b"".join(lines[30:])))


def write_arrow(path: Path, column: pa.Array, writer: Callable[..., Any]) -> None:
    table = pa.table({"id": range(len(DOCUMENTS)), "text": column})
    with writer(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=7)


def write_wikicorpus(path: Path, articles: Sequence[str]) -> None:
    """Write an archive with a folder of two files."""
    half = (len(articles) + 1) // 2
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        folder = tarfile.TarInfo("raw.en")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, member in enumerate((articles[:half], articles[half:])):
            text = "".join(
                f'<doc id="{index}" title="x" nonfiltered="1" processed="1" dbindex="{index}">\n'
                f"{article}\n\nENDOFARTICLE.\n</doc>\n"
                for index, article in enumerate(member)
            ).encode("latin-1")
            entry = tarfile.TarInfo(f"raw.en/englishText_{number}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))


def write_dictionary_parquet(path: Path) -> None:
    column = pa.array([text or None for text in DOCUMENTS]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), path, row_group_size=100)


@pytest.mark.parametrize("split_bytes", [37, 10**9])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.json", write_raw_jsonl),
        ("a.jsonl.gz", write_gzip),
        ("a.jsonl.zst", partial(write_compressed, codec="zstd")),
        ("a.jsonl.lz4", partial(write_compressed, codec="lz4")),
        ("a.jsonl.bz2", write_two_bzip2_streams),
        ("a.parquet", write_parquet),
        ("b.parquet", write_dictionary_parquet),
        ("a.arrow", partial(write_arrow, column=pa.array(DOCUMENTS), writer=pa.ipc.new_file)),
        ("b.arrow", partial(write_arrow, column=pa.array(DOCUMENTS, pa.large_string()), writer=pa.ipc.new_stream)),
        ("c.arrow", partial(write_arrow, column=pa.array(DOCUMENTS, pa.string_view()), writer=pa.ipc.new_file)),
        ("d.arrow", partial(write_arrow, column=pa.array(DOCUMENTS).dictionary_encode(), writer=pa.ipc.new_stream)),
    ],
)
def test_every_format_gives_every_document_once_and_in_order(
    tmp_path: Path, name: str, write: Callable[[Path], None], split_bytes: int
) -> None:
    write(tmp_path / name)
    assert read_all(Source(uri=str(tmp_path)), split_bytes) == DOCUMENTS


def test_all_formats_give_the_same_corpus(tmp_path: Path, model: Path) -> None:
    (tmp_path / "given").mkdir()
    write_jsonl(tmp_path / "given" / "a.jsonl")
    write_compressed(tmp_path / "given" / "b.jsonl.zst", "zstd")
    write_parquet(tmp_path / "given" / "c.parquet")
    write_arrow(tmp_path / "given" / "d.arrow", pa.array(DOCUMENTS), pa.ipc.new_stream)
    digests = set()
    for path in (tmp_path / "given").iterdir():
        recipe = write_recipe(tmp_path, path, tokenizer__model=str(model), model__vocab_size=PIECES)
        assert run(recipe, tmp_path / path.name, "--corpus.split_bytes=3000") == 0
        digests.add(published(tmp_path / path.name).manifest.content_digest)
    assert len(digests) == 1


def test_a_column_whose_name_has_a_dot_or_begins_like_another(tmp_path: Path) -> None:
    columns = {"meta": ["m"], "meta.text": ["mt"], "meta.text.en": ["mte"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column, values in columns.items():
        assert read_all(Source(uri=str(tmp_path / "a.parquet"), column=column)) == values


def test_what_datasets_saves_to_disk_is_read(tmp_path: Path) -> None:
    """The folder has Arrow streams, and JSON files that hold no documents."""
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert len(list((tmp_path / "saved").glob("*.json"))) == 2

    assert read_all(Source(uri=str(tmp_path / "saved"))) == DOCUMENTS
    assert read_all(Source(uri=f"datasets://{tmp_path / 'saved'}")) == DOCUMENTS


@pytest.mark.parametrize("name", ["raw.en.tgz", "raw.en.tar"])
def test_a_wikicorpus_archive_gives_its_articles(tmp_path: Path, name: str) -> None:
    articles = [
        "caf\xe9, na\xefve \xa9",
        "first line\n\nsecond  line ",
        " indented",
        "",
        "a ENDOFARTICLE. within a line",
    ]
    write_wikicorpus(tmp_path / name, articles)
    assert (b"caf\xe9" in (tmp_path / name).read_bytes()) == name.endswith(".tar")  # not UTF-8

    assert read_all(Source(uri=str(tmp_path / name), format="wikicorpus")) == articles


def test_a_large_jsonl_is_cut_and_small_files_share_a_partition(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "large.jsonl")
    write_documents(tmp_path / "small", make_documents(600, mean_bytes=20))
    recipe = load_recipe(
        write_recipe(tmp_path, tmp_path / "large.jsonl", tmp_path / "small", corpus__split_bytes=2_000)
    )

    partitions = plan_in(tmp_path, recipe)

    files_per_partition = [len({each.file.name for each in partition.file_ranges}) for partition in partitions]
    assert max(files_per_partition) > 5
    assert sum(partition.file_ranges[0].file.name == "large.jsonl" for partition in partitions) > 5
    assert all(partition.bytes <= 2_000 for partition in partitions)


def test_files_folders_and_globs_are_read_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    write_documents(tmp_path / "folder" / "deep", [b"in a folder"])
    (tmp_path / "one.md").write_bytes(b"a file")
    write_documents(tmp_path / "many", [b"glob one", b"glob two", b"glob three"])
    (tmp_path / "many" / "notes.rst").write_bytes(b"not matched")
    recipe = write_recipe(
        tmp_path,
        tmp_path / "one.md",
        tmp_path / "many" / "0000[02].txt",
        tmp_path / "folder",
        tokenizer__train__vocab_size=300,
        model__vocab_size=300,
    )
    assert run(recipe, tmp_path / "fsx") == 0
    found = decode_documents(published(tmp_path / "fsx").path, "train")
    assert found == [b"a file", b"glob one", b"glob three", b"in a folder"]


def test_files_of_unknown_formats_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.png", "c.pyc", "d.pyc", "README", ".hidden.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        files = list_inputs(Source(uri=str(tmp_path)))

    assert [file.name for file in files] == ["a.txt"]
    assert ".pyc" in caplog.text
    assert len(list_inputs(Source(uri=str(tmp_path), format="text"))) == 5


def test_other_file_systems_are_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec  # noqa: PLC0415

    memory = fsspec.filesystem("memory")
    memory.pipe("/texts/a.txt", make_documents(1, mean_bytes=3_000)[0])
    recipe = write_recipe(tmp_path, "memory://texts/*.txt", tokenizer__train__vocab_size=300, model__vocab_size=300)
    before = list_corpus_inputs(load_recipe(recipe)).artifact_id
    assert run(recipe, tmp_path / "fsx") == 0
    assert decode_documents(published(tmp_path / "fsx").path, "train") == make_documents(1, mean_bytes=3_000)

    memory.pipe("/texts/a.txt", b"something else")
    assert list_corpus_inputs(load_recipe(recipe)).artifact_id != before
