"""The files of a folder or a glob are those that its owner sees: through links, without hidden ones, of any name."""

from __future__ import annotations

import glob
import logging
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from services.common.errors import ArtifactError, MillraceError, RecipeError
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Source
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.builders import (
    DOCUMENTS,
    Stage,
    decode_documents,
    make_documents,
    published,
    read_all,
    write_documents,
    write_jsonl,
    write_plan,
    write_recipe,
)


def write_tree(folder: Path, *names: str | bytes) -> Path:
    """Write a file for each name; `a -> b` is a link."""
    for name in names:
        place, arrow, target = os.fsdecode(name).partition(" -> ")
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if arrow:
            path.symlink_to(target)
        else:
            path.write_text(f"{os.fsencode(name)!r}\n")
    return folder


def write_to_memory(names: Iterable[str]) -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    for name in names:
        fsspec.filesystem("memory").pipe_file(f"/{name}", b"x\n")


def names_of(uri: str | Path, **keys: Any) -> list[str]:
    """Return the paths that a source reads, relative to the folder `data`."""
    return [file.uri.partition("/data/")[2] for file in list_inputs(Source(uri=str(uri), **keys))]


LINKED = (
    *("data/en -> ../elsewhere/en", "data/de/a.txt", "data/de/more/b.txt", "data/c.txt -> ../elsewhere/c.txt"),
    *("elsewhere/en/d.txt", "elsewhere/en/more/e.txt", "elsewhere/c.txt", "data/twice -> ../elsewhere/en/more"),
)


@pytest.mark.parametrize("pattern", ["*.txt", "*/*.txt", "en/*.txt", "*/more/*.txt", "[de]?/*.txt", "**/*.txt", "**"])
def test_a_glob_follows_links_as_the_shell_does(tmp_path: Path, pattern: str) -> None:
    write_tree(tmp_path, *LINKED)

    found = names_of(f"{tmp_path}/data/{pattern}")

    expected = glob.iglob(pattern, root_dir=tmp_path / "data", recursive=True)  # noqa: PTH207 - pathlib follows no links
    assert found == sorted(name for name in expected if (tmp_path / "data" / name).is_file()) != []


@pytest.mark.parametrize("uri", ["", "/", "/**", "/**/*.txt", "/en/**", "/*/*/*.txt", "/*/"])
def test_a_snapshot_in_the_cache_of_the_hub_is_read_at_any_depth(tmp_path: Path, uri: str) -> None:
    cache = "data/.cache/hub/datasets--owner--name"
    snapshot = f"{cache}/snapshots/0123"
    write_tree(tmp_path, f"{cache}/blobs/aa", f"{cache}/blobs/bb", f"{cache}/blobs/cc")
    write_tree(tmp_path, f"{snapshot}/en/raw/0.txt -> ../../../../blobs/aa", f"{snapshot}/README.md -> ../../blobs/cc")
    write_tree(tmp_path, f"{snapshot}/en/raw/1.txt -> ../../../../blobs/bb")

    source = Source(uri=f"{tmp_path}/{snapshot}{uri}")

    assert [Path(file.uri).name for file in list_inputs(source)] == ["0.txt", "1.txt"]
    assert read_all(source) == [f"{os.fsencode(f'{cache}/blobs/{each}')!r}\n" for each in ("aa", "bb")]


HIDDEN = (
    *("data/a.txt", "data/._a.txt", "data/.ipynb_checkpoints/a.txt", "data/__pycache__/b.txt", "data/__c.txt"),
    *("data/_d.txt", "data/x/.y/z.txt", "data/x/.y/.z.txt", "data/x/e.txt", "data/x/__y/f.txt", "data/x/..g.txt"),
    *("data/README.md", "data/x/README.md", "data/config.json", "data/dataset_info.json", "data/_SUCCESS"),
    *("data/x/_SUCCESS", "data/__MACOSX/._x.txt", "data/h.md"),
)


@pytest.mark.parametrize(
    "pattern",
    [
        *("**", "*", "*/*", "**/*.txt", "*.txt", ".*", "**/.*", "*/.*/*", "x/.y/*", "x/.y/.*", "x/.y/**", "**/.y/*"),
        *("__*/*", "__pycache__/*", "**/__y/*", "__MACOSX/.*", "x/**", "__c.txt", "_*", "**/README.md", ".ipynb*/*"),
        *("x", "x/.y", "__pycache__", "config.json", "README.md", "._a.txt", "*/__y/**", "[_]*"),
    ],
)
def test_hidden_files_are_those_of_datasets(tmp_path: Path, pattern: str) -> None:
    """A folder is read as its pattern `**`; the end marker `_SUCCESS` has no rows."""
    data_files = pytest.importorskip("datasets.data_files")
    write_tree(tmp_path, *HIDDEN)
    path = tmp_path / "data" / pattern
    resolved = data_files.resolve_pattern(f"{path}/**" if path.is_dir() else str(path), str(tmp_path))

    found = names_of(path, format="text")
    write_to_memory(HIDDEN)
    assert names_of(f"memory://data/{pattern}", format="text") == found

    expected = {path.partition("/data/")[2] for path in resolved if not path.endswith("_SUCCESS")}
    assert set(found) == expected


def test_what_writers_leave_beside_their_parts_is_no_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marks = ["_SUCCESS", "_committed_12", "_started_12", "_metadata", "_common_metadata"]
    write_tree(tmp_path, *(f"data/{name}" for name in ["part-0", "_metadata.txt", "x/part-1", *marks]))
    assert names_of(tmp_path / "data", format="text") == ["_metadata.txt", "part-0", "x/part-1"]
    assert not caplog.records
    assert [names_of(tmp_path / "data" / name, format="text") for name in marks] == [[name] for name in marks]


LOGS = {
    "Delta": ["part-0.parquet", "part-1.parquet", "_delta_log/00000000000000000000.json"],
    "Delta in a folder": ["deep/part-0.parquet", "deep/_delta_log/00000000000000000010.checkpoint.parquet"],
    "Iceberg": ["data/00000-0-a.parquet", "metadata/00000-b.metadata.json", "metadata/snap-1.avro"],
    "Spark's stream": ["part-0.parquet", "_spark_metadata/0"],
    "a job of Spark that was killed": ["part-0.json", "_temporary/0/_temporary/attempt_1/part-1.json"],
}


@pytest.mark.parametrize("names", LOGS.values(), ids=LOGS)
def test_a_table_is_refused_and_its_live_files_are_named_alone(tmp_path: Path, names: list[str]) -> None:
    """Its folder also holds removed rows, which only its log tells."""
    files = [f"data/{name}" for name in names]
    write_tree(tmp_path, *files)
    write_to_memory(files)
    live = names[0]
    for base in (str(tmp_path), "memory:/"):
        for uri in ("data", "data/", "data/**"):
            with pytest.raises(RecipeError, match="file_uris"):
                names_of(f"{base}/{uri}")
        assert names_of(f"{base}/data/{live}") == [live]
    if "_delta_log" in names[-1]:
        with pytest.raises(RecipeError):
            names_of(f"{tmp_path}/data/{Path(live).parent}/*.parquet")


SPLITS = {
    "folders": ["train/a.txt", "train/b.txt", "test/a.txt"],
    "names of files": ["train.txt", "my-val_1.txt", "test-00000-of-00001.txt"],
    "an evaluation": ["x/train_1/a.txt", "x/evaluation.v2/a.txt"],
    "one split": ["train/a.txt", "train/b.txt"],
    "words that hold a keyword": ["training.txt", "latest.txt", "contest/a.txt", "devil.txt"],
    "no split": ["a.txt", "b.txt"],
}


@pytest.mark.parametrize("names", SPLITS.values(), ids=SPLITS)
def test_a_folder_of_several_splits_is_read_whole_and_says_so(
    tmp_path: Path, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")
    folder = write_tree(tmp_path, *(f"data/{name}" for name in names)) / "data"
    splits = datasets.load_dataset_builder(str(folder), cache_dir=str(tmp_path / "cache")).config.data_files

    assert names_of(folder) == sorted(names)

    assert ("splits" in caplog.text) == (len(splits) > 1)
    chosen = [file.uri.partition("/data/")[2] for file in list_inputs(Source(uri=f"datasets://{folder}"))]
    assert sorted(chosen) == sorted(str(path).partition("/data/")[2] for path in splits["train"])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"ab" * 32)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.json", "a.parquet", "a.arrow", "a.txt.gz", "a.csv"])
@pytest.mark.parametrize("protocol", ["", "datasets://"])
def test_a_pointer_of_git_is_no_document(tmp_path: Path, name: str, protocol: str) -> None:
    (tmp_path / "it's").mkdir()
    (tmp_path / "it's" / name).write_bytes(POINTER)
    keys = {"format": "text"} if name == "a.csv" and not protocol else {}
    with pytest.raises(ArtifactError) as caught:
        names_of(f"{protocol}{tmp_path}/it's", **keys)
    command = shlex.split(str(caught.value).split("`")[1])
    assert command == ["git", "-C", f"{tmp_path}/it's", "lfs", "pull"]


def test_a_link_to_no_file_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, "data/b.txt", "data/a.txt -> nowhere")
    with pytest.raises(ArtifactError, match=r"a\.txt"):
        names_of(tmp_path / "data")


NAMES: tuple[str | bytes, ...] = (
    *(b"latin-\xe9.txt", "日本語.txt", "e\u0301.txt", "a b.txt", " .txt", "a\nb.txt", "a[1].txt", "a::b.txt"),
    *("what?.txt", "*.txt", "a%20b.txt", "zip::a.txt", "'quoted\".txt", "{a,b}.txt", "back\\.txt"),
)


def test_files_of_any_name_are_read(tmp_path: Path) -> None:
    """In folders of such names, too: by the folder and by globs, and by the names that can be written."""
    folder = tmp_path / "日本 [x] ::é"
    folder.mkdir()
    for name in NAMES:
        Path(folder, os.fsdecode(name)).write_bytes(os.fsencode(name) if isinstance(name, str) else b"of bytes")
    everything = sorted(name if isinstance(name, str) else "of bytes" for name in NAMES)
    for uri in (str(folder), f"{glob.escape(str(folder))}/*.txt"):
        assert sorted(read_all(Source(uri=uri))) == everything
    for name in NAMES:
        if isinstance(name, str):
            assert read_all(Source(uri=f"{folder}/{name}")) == [name]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("out.jsonl", ["out.jsonl/part-0", "out.jsonl/part-1.gz", "out.jsonl/part-2.json"]),
        ("out.jsonl/", ["out.jsonl/part-0", "out.jsonl/part-1.gz", "out.jsonl/part-2.json"]),
        ("*.jsonl", ["a.jsonl", "out.jsonl/part-0", "out.jsonl/part-1.gz", "out.jsonl/part-2.json"]),
        ("o*.jsonl/part-*", ["out.jsonl/part-0", "out.jsonl/part-1.gz", "out.jsonl/part-2.json"]),
        ("*", ["a.jsonl"]),
        ("*/", ["out.jsonl/part-0", "out.jsonl/part-1.gz", "out.jsonl/part-2.json", "x/b.jsonl"]),
    ],
)
def test_a_folder_that_spark_has_written_is_data(tmp_path: Path, uri: str, expected: list[str]) -> None:
    parts = ["part-0", "part-1.gz", "part-2.json", ".part-0.crc", "_SUCCESS", "._SUCCESS.crc"]
    files = ["data/a.jsonl", "data/x/b.jsonl", *(f"data/out.jsonl/{part}" for part in parts)]
    write_tree(tmp_path, *files)
    write_to_memory(files)
    for base in (str(tmp_path), "memory:/"):
        found = list_inputs(Source(uri=f"{base}/data/{uri}"))

        assert [file.uri.partition("/data/")[2] for file in found] == expected
        assert {file.format for file in found} == {"jsonl"}


@pytest.mark.parametrize(
    ("uri", "exit_code", "written"),
    [
        ("data/[en]/*.txt", 3, "data/[[]en]/*.txt"),
        ("data/[[]e*", 3, "data/[[]e*/"),
        ("data/x/*", 3, "data/x/.*"),
        ("data/y", 2, "data/y/README.md"),
        ("data/model", 2, None),
    ],
)
def test_what_is_refused_can_be_written_in_another_way(
    tmp_path: Path, uri: str, exit_code: int, written: str | None
) -> None:
    write_tree(tmp_path, "data/[en]/a.txt", "data/x/.b.txt", "data/y/README.md", "data/model/tokenizer.json")
    with pytest.raises(MillraceError) as caught:
        names_of(tmp_path / uri)
    assert caught.value.exit_code == exit_code
    if written:
        assert names_of(f"{tmp_path}/{written}")


def test_files_folders_and_globs_are_read_in_the_order_of_the_recipe(stage: Stage, tmp_path: Path) -> None:
    write_documents(tmp_path / "folder" / "deep", [b"in a folder"])
    (tmp_path / "one.md").write_bytes(b"a file")
    write_documents(tmp_path / "many", [b"glob one", b"glob two", b"glob three"])
    (tmp_path / "many" / "notes.rst").write_bytes(b"not matched")
    sources = tmp_path / "one.md", tmp_path / "many" / "0000[02].txt", tmp_path / "folder"

    assert stage.run(*sources) == 0

    found = decode_documents(published(stage.root).path, "train")
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


def test_a_large_jsonl_is_cut_and_small_files_share_a_partition(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "large.jsonl", DOCUMENTS)
    write_documents(tmp_path / "small", make_documents(600, mean_bytes=20))
    path = write_recipe(tmp_path, tmp_path / "large.jsonl", tmp_path / "small", corpus__split_bytes=2_000)

    plan = write_plan(tmp_path / "plan", load_recipe(path))
    partitions = [plan.read_partition(index) for index in range(len(plan.read_partitions()))]

    files_per_partition = [len({each.file.name for each in partition.file_ranges}) for partition in partitions]
    assert max(files_per_partition) > 5
    assert sum(partition.file_ranges[0].file.name == "large.jsonl" for partition in partitions) > 5
    assert all(sum(each.bytes for each in partition.file_ranges) <= 2_000 for partition in partitions)
