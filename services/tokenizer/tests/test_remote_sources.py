"""Documents on web servers, in stores, on the Hugging Face hub and in its data sets."""

from __future__ import annotations

import http.server
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe import Source
from services.tokenizer.sources import hub
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.builders import make_documents, published, run, write_recipe
from services.tokenizer.tests.stored_documents import DOCUMENTS, read_all, write_gzip, write_jsonl, write_parquet

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
