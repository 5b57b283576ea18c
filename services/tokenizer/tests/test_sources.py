"""The same documents give the same tokens in all file formats, and for all sizes of partitions."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Source
from services.tokenizer.corpus_inputs import list_corpus_inputs
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.bad_input.test_damage import ARTICLE, archive
from services.tokenizer.tests.builders import (
    DOCUMENTS,
    decode_documents,
    make_documents,
    plan_in,
    published,
    read_all,
    run,
    write_documents,
    write_jsonl,
    write_recipe,
)


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


@pytest.mark.parametrize(("name", "mode"), [("raw.en.tgz", "w:gz"), ("raw.en.tar", "w")])
def test_a_wikicorpus_archive_gives_its_articles(tmp_path: Path, name: str, mode: str) -> None:
    """The archive's files are in latin-1."""
    articles = [
        "caf\xe9, na\xefve \xa9",
        "first line\n\nsecond  line ",
        " indented",
        "",
        "a ENDOFARTICLE. within a line",
    ]
    members = ["".join(ARTICLE % ("x", text) for text in part) for part in (articles[:3], articles[3:])]
    (tmp_path / name).write_bytes(archive(*members, mode=mode))
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
    assert all(sum(each.bytes for each in partition.file_ranges) <= 2_000 for partition in partitions)


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
