"""Where documents come from: the same documents give the same tokens, however they are stored and cut."""

from __future__ import annotations

import bz2
import gzip
import http.server
import io
import json
import logging
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe import Source
from services.common.recipe_file import load_recipe
from services.tokenizer.plan import make_plan
from services.tokenizer.sources import hub
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.builders import (
    decode_documents,
    make_documents,
    published,
    run,
    write_documents,
    write_recipe,
)

DOCUMENTS = ["first\r\nline", "", " ", "nul\0", "emoji 👍🏽", "e\u0301", '" and \\ and \u2028 and \x85 breaks', "last"]
DOCUMENTS += [document.decode() for document in make_documents(140, mean_bytes=60)]


def read_all(source: Source, split_bytes: int = 10**9) -> list[str]:
    pieces = [piece for file in list_inputs(source) for piece in cut_file(file, split_bytes)]
    return [document.decode() for batch in read_documents(pieces, "reject") for document in batch.documents()]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")


def write_raw_jsonl(path: Path) -> None:
    """Characters as themselves, no line end after the last line, and lines with nothing on them."""
    lines = "\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in DOCUMENTS)
    path.write_text(lines, encoding="utf-8")


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text or None}) + "\n" for text in DOCUMENTS)


def write_compressed(path: Path, codec: str) -> None:
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in DOCUMENTS).encode()
    with pa.CompressedOutputStream(str(path), codec) as file:
        file.write(lines)


def write_two_bzip2_streams(path: Path) -> None:
    """As pbzip2 writes them."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in DOCUMENTS]
    path.write_bytes(bz2.compress(b"".join(lines[:30])) + bz2.compress(b"".join(lines[30:])))


def write_arrow(path: Path, column: pa.Array, writer: Callable[..., Any]) -> None:
    table = pa.table({"id": range(len(DOCUMENTS)), "text": column})
    with writer(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=7)


def write_wikicorpus(path: Path, articles: Sequence[str]) -> None:
    """Two members, of which the first has an article more, in a folder of the archive."""
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


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS}), path, row_group_size=7)


def write_dictionary_parquet(path: Path) -> None:
    column = pa.array([text or None for text in DOCUMENTS]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), path, row_group_size=100)


@pytest.mark.parametrize("split_bytes", [1, 37, 1_000, 10**9])
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


def test_all_formats_give_the_same_corpus(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    write_jsonl(tmp_path / "given" / "a.jsonl")
    write_compressed(tmp_path / "given" / "b.jsonl.zst", "zstd")
    write_parquet(tmp_path / "given" / "c.parquet")
    write_arrow(tmp_path / "given" / "d.arrow", pa.array(DOCUMENTS), pa.ipc.new_stream)
    digests = set()
    for path in (tmp_path / "given").iterdir():
        recipe = write_recipe(tmp_path, path, tokenizer__train__vocab_size=310, model__vocab_size=310)
        assert run(recipe, tmp_path / path.name, "--corpus.split_bytes=3000") == 0
        digests.add(published(tmp_path / path.name).manifest.content_digest)
    assert len(digests) == 1


def test_a_column_whose_name_has_a_dot_or_begins_like_another(tmp_path: Path) -> None:
    columns = {"meta": ["m"], "meta.text": ["mt"], "meta.text.en": ["mte"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column, values in columns.items():
        assert read_all(Source(uri=str(tmp_path / "a.parquet"), column=column)) == values


def test_what_datasets_saves_to_disk_is_read(tmp_path: Path) -> None:
    """Arrow streams, beside which are records in JSON that hold no documents."""
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


def test_a_large_jsonl_is_cut_and_small_files_share_a_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "large.jsonl")
    write_documents(tmp_path / "small", make_documents(20, mean_bytes=20))
    recipe = load_recipe(
        write_recipe(tmp_path, tmp_path / "large.jsonl", tmp_path / "small", corpus__split_bytes=2_000)
    )

    splits = make_plan(recipe).splits

    files_per_split = [len({piece.file.name for piece in split.pieces}) for split in splits]
    assert max(files_per_split) > 5
    assert sum(split.pieces[0].file.name == "large.jsonl" for split in splits) > 5
    assert all(split.bytes <= 2_000 for split in splits)


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


def test_neighbouring_row_groups_are_read_at_once(tmp_path: Path) -> None:
    """A file on the hub has hundreds of them, and would be asked for that often."""
    table = pa.table({"text": DOCUMENTS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    recipe = load_recipe(write_recipe(tmp_path, tmp_path / "a.parquet", corpus__split_bytes=2_000))
    splits = make_plan(recipe).splits
    assert [len(split.pieces) for split in splits] == [1] * len(splits)
    assert [split.pieces[0].begin for split in splits[1:]] == [split.pieces[0].end for split in splits[:-1]]
    assert 2 < len(splits) < splits[-1].pieces[0].end == 15


def test_a_folder_says_what_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.png", "c.pyc", "d.pyc", "README", ".hidden.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        files = list_inputs(Source(uri=str(tmp_path)))

    assert [file.name for file in files] == ["a.txt"]
    assert "4 files skipped" in caplog.text
    assert ".pyc (2)" in caplog.text
    assert len(list_inputs(Source(uri=str(tmp_path), format="text"))) == 5


def test_bytes_that_are_not_utf8_in_json_are_repaired_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n{"text": "lone \\ud800 surrogate"}\n{"text": "pair \\ud83d\\ude00"}\n'
    )
    files = list_inputs(Source(uri=str(tmp_path)))
    [batch] = read_documents(cut_file(files[0], 10**6), "replace")

    expected = ["caf\ufffd", "lone \ufffd surrogate", "pair 😀"]
    assert [document.decode() for document in batch.documents()] == expected
    assert batch.num_repaired == 2


def test_other_file_systems_are_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec  # noqa: PLC0415

    memory = fsspec.filesystem("memory")
    memory.pipe("/texts/a.txt", make_documents(1, mean_bytes=3_000)[0])
    recipe = write_recipe(tmp_path, "memory://texts/*.txt", tokenizer__train__vocab_size=300, model__vocab_size=300)
    before = make_plan(load_recipe(recipe)).artifact_id
    assert run(recipe, tmp_path / "fsx") == 0
    assert decode_documents(published(tmp_path / "fsx").path, "train") == make_documents(1, mean_bytes=3_000)

    memory.pipe("/texts/a.txt", b"something else")
    assert make_plan(load_recipe(recipe)).artifact_id != before


# Web servers and stores


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


class HandlerWithoutSizes(QuietHandler):
    """A server that makes its answers while it sends them."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in ("Content-Length", "Last-Modified"):
            super().send_header(keyword, value)


@contextmanager
def serve(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_web_server_gives_the_corpus_of_the_files_on_it(tmp_path: Path) -> None:
    """By the address of a file, by a glob and by a folder."""
    site = tmp_path / "site"
    (site / "texts").mkdir(parents=True)
    write_parquet(site / "texts" / "a.parquet")
    write_jsonl(site / "texts" / "b.jsonl")
    write_gzip(site / "texts" / "c.jsonl.gz")
    names = ["a.parquet", "b.jsonl", "c.jsonl.gz"]
    settings: dict[str, Any] = {"tokenizer__train__vocab_size": 310, "model__vocab_size": 310}
    with serve(site) as address:
        sources = {
            "files": [f"{address}/texts/{name}" for name in names],
            "glob": [f"{address}/texts/*"],
            "folder": [f"{address}/texts/"],
            "local": [str(site / "texts")],
        }
        for name, uris in sources.items():
            assert run(write_recipe(tmp_path, *uris, **settings), tmp_path / name) == 0
    made = {name: published(tmp_path / name).manifest for name in sources}
    assert len({manifest.content_digest for manifest in made.values()}) == 1
    assert made["local"].corpus.documents_read == 3 * len(DOCUMENTS)


def test_a_web_server_that_does_not_tell_sizes_loses_no_document(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    with serve(tmp_path, HandlerWithoutSizes) as address:
        source = Source(uri=f"{address}/a.jsonl")
        [before] = list_inputs(source)
        assert before.bytes == 0
        assert read_all(source, split_bytes=100) == DOCUMENTS

        (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b"first", b"FIRST"))
        [after] = list_inputs(source)
        assert before.digest != after.digest  # by its content, for want of anything else


def test_a_web_server_that_serves_whole_files_alone_is_named_where_a_part_is_needed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    with serve(tmp_path) as address, pytest.raises(ArtifactError, match=r"a\.jsonl: cannot be read: .*range requests"):
        read_all(Source(uri=f"{address}/a.jsonl"), split_bytes=1_000)


def test_a_web_server_that_is_down_or_lacks_the_file(tmp_path: Path) -> None:
    with serve(tmp_path) as address, pytest.raises(ArtifactError, match=r"a\.jsonl: no such file or folder"):
        list_inputs(Source(uri=f"{address}/a.jsonl"))
    with pytest.raises(ArtifactError, match=r"a\.jsonl: cannot be read: .*onnect"):
        list_inputs(Source(uri=f"{address}/a.jsonl"))


def test_s3_without_credentials_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    begin = time.monotonic()

    assert run(write_recipe(tmp_path, "s3://bucket/texts/*.jsonl"), tmp_path / "fsx") == 3

    assert time.monotonic() - begin < 20
    message = "s3://bucket/texts/*.jsonl: cannot be read: Unable to locate credentials."
    assert message in capsys.readouterr().err


# The Hugging Face hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("uri", "revision", "expected"),
    [
        ("hf://datasets/owner/name", COMMIT, f"hf://datasets/owner/name@{COMMIT}"),
        ("hf://datasets/owner/name/a/b.parquet", "main", "hf://datasets/owner/name@main/a/b.parquet"),
        ("hf://datasets/owner/name/**/*.parquet", "v1.0", "hf://datasets/owner/name@v1.0/**/*.parquet"),
        ("hf://datasets/o/n/x", "refs/convert/parquet", "hf://datasets/o/n@refs%2Fconvert%2Fparquet/x"),
        ("hf://datasets/o/n/x", "fix/a b", "hf://datasets/o/n@fix%2Fa%20b/x"),
        ("hf://datasets/o/n/images@2x/x.txt", "main", "hf://datasets/o/n@main/images@2x/x.txt"),
        ("hf://owner/model/corpus.txt", "main", "hf://owner/model@main/corpus.txt"),
        ("hf://spaces/owner/name/x", "main", "hf://spaces/owner/name@main/x"),
        ("hf://datasets/owner/name", None, "hf://datasets/owner/name"),
        ("some/folder", None, "some/folder"),
    ],
)
def test_a_revision_goes_where_the_hubs_file_system_looks_for_it(uri: str, revision: str | None, expected: str) -> None:
    assert hub.with_revision(uri, revision) == expected
    if revision is not None:
        parsed = pytest.importorskip("huggingface_hub").parse_hf_uri(expected)
        assert parsed.revision == revision
        path = uri.split("/", 5)[5:] if "datasets/" in uri or "spaces/" in uri else uri.split("/", 4)[4:]
        assert parsed.path_in_repo == "".join(path)


@pytest.mark.parametrize("uri", ["hf://datasets/owner/name@main/x", "hf://datasets/name", "hf://datasets", "hf://name"])
def test_a_revision_needs_a_repository_without_one(uri: str) -> None:
    with pytest.raises(RecipeError, match="`revision` needs a path like hf://datasets/OWNER/NAME/FOLDER"):
        hub.with_revision(uri, "main")


def test_a_branch_is_warned_about_and_a_commit_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hub.with_revision("hf://datasets/owner/name/x", COMMIT)
        assert not caplog.records
        hub.with_revision("hf://datasets/owner/name/x", "main")
    assert "revision 'main' is a branch or a tag, which may move" in caplog.text


@pytest.mark.parametrize("uri", ["some/folder", "pydoc://", "http://host/a.jsonl", "s3://bucket/a.jsonl"])
def test_a_revision_of_what_has_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], uri: str) -> None:
    source = f'[[corpus.sources]]\nuri = "{uri}"\nrevision = "main"\n'
    assert run(write_recipe(tmp_path, sources=source), tmp_path / "fsx") == 2
    assert f"revision is a key of hf:// and datasets:// sources, and this one is {uri}" in capsys.readouterr().err


CARD = """---
configs:
- config_name: english
  data_files:
  - split: train
    path: [en/train-*.parquet, more/*.parquet]
  - split: test
    path: en/test.parquet
- config_name: german
  data_files: de/*.parquet
---
# A data set
"""


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as it is on the hub: a card, two subsets, and files in several folders."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder = tmp_path / "data-set"
    documents = [document.decode() for document in make_documents(50)]
    names = ["en/train-0.parquet", "en/train-1.parquet", "more/0.parquet", "en/test.parquet", "de/0.parquet"]
    for index, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": documents[index * 10 :][:10]}), folder / name)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


def read_subset(folder: Path, **keys: str) -> list[str]:
    return read_all(Source(uri=f"datasets://{folder}", **keys))  # type: ignore[arg-type]


def test_a_subset_and_split_are_the_files_that_the_card_names(tmp_path: Path, data_set: Path) -> None:
    keys = f'[[corpus.sources]]\nuri = "datasets://{data_set}"\nsubset = "english"\nsplit = "train"\n'
    settings: dict[str, Any] = {"tokenizer__train__vocab_size": 300, "model__vocab_size": 300}
    assert run(write_recipe(tmp_path, sources=keys, **settings), tmp_path / "named") == 0
    files = (data_set / "en" / "train-*.parquet", data_set / "more")
    assert run(write_recipe(tmp_path, *files, **settings), tmp_path / "files") == 0

    named, direct = published(tmp_path / "named").manifest, published(tmp_path / "files").manifest
    assert named.content_digest == direct.content_digest
    assert named.corpus.documents_read == 30
    documents = [document.decode() for document in make_documents(50)]
    assert read_subset(data_set, subset="english", split="test") == documents[30:40]
    assert read_subset(data_set, subset="german") == documents[40:]


def test_files_of_several_folders_keep_the_names_that_tell_them_apart(data_set: Path) -> None:
    files = list_inputs(Source(uri=f"datasets://{data_set}", subset="english"))
    assert [file.name for file in files] == ["en/train-0.parquet", "en/train-1.parquet", "more/0.parquet"]


@pytest.mark.parametrize(
    ("keys", "exit_code", "expected"),
    [
        ('subset = "english"\nsplit = "validation"', 3, "no split 'validation'; it has train, test. Set `split`."),
        ('subset = "french"', 3, "BuilderConfig 'french' not found. Available: ['english', 'german']"),
        ("", 3, "Please pick one among the available configs: ['english', 'german']"),
        ('subset = "english"\nrevision = "main"', 2, "`revision` is of a repository on the Hugging Face hub"),
    ],
)
def test_what_a_data_set_does_not_have(
    tmp_path: Path, data_set: Path, capsys: pytest.CaptureFixture[str], keys: str, exit_code: int, expected: str
) -> None:
    source = f'[[corpus.sources]]\nuri = "datasets://{data_set}"\n{keys}\n'
    assert run(write_recipe(tmp_path, sources=source), tmp_path / "fsx") == exit_code
    message = capsys.readouterr().err
    assert f"datasets://{data_set}: " in message
    assert expected in message


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.csv": "text\nhello\n"}, "its files are of a format that is not read here (Csv"),
        ({"README.md": "---\nconfigs: [a: b\n---\n", "a.jsonl": '{"text": "x"}\n'}, "while parsing a flow sequence"),
        ({}, "doesn't contain any data files"),
    ],
)
def test_a_folder_that_is_no_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], expected: str
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "folder").mkdir()
    for name, content in files.items():
        (tmp_path / "folder" / name).write_text(content, encoding="utf-8")
    assert run(write_recipe(tmp_path, f"datasets://{tmp_path / 'folder'}"), tmp_path / "fsx") in (2, 3)
    message = capsys.readouterr().err
    assert f"millrace: datasets://{tmp_path / 'folder'}: " in message
    assert expected in message
