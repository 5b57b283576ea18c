"""Documents are read from web servers, stores, the Hugging Face hub and its data sets."""

from __future__ import annotations

import base64
import gzip
import http.server
import logging
import os
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources import hub
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.tests.builders import (
    DOCUMENTS,
    jsonl,
    make_documents,
    publish,
    read_all,
    run,
    serve,
    write_jsonl,
    write_recipe,
)

# Web servers and stores


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


class HandlerWithoutSizes(QuietHandler):
    """A web server that does not tell the sizes of its files."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword not in ("Content-Length", "Last-Modified"):
            super().send_header(keyword, value)


def serve_folder(folder: Path, handler: type[QuietHandler] = QuietHandler) -> AbstractContextManager[str]:
    return serve(partial(handler, directory=str(folder)))


def test_a_web_server_gives_the_corpus_of_the_files_on_it(tmp_path: Path, model: Path) -> None:
    """A source is the address of a file, a glob or a folder."""
    site = tmp_path / "site"
    (site / "texts").mkdir(parents=True)
    pq.write_table(pa.table({"text": DOCUMENTS}), site / "texts" / "a.parquet", row_group_size=7)
    write_jsonl(site / "texts" / "b.jsonl", DOCUMENTS)
    (site / "texts" / "c.jsonl.gz").write_bytes(gzip.compress(jsonl([text or None for text in DOCUMENTS])))
    names, digests = ["a.parquet", "b.jsonl", "c.jsonl.gz"], set()
    with serve_folder(site) as address:
        sources = {
            "files": [f"{address}/texts/{name}" for name in names],
            "glob": [f"{address}/texts/*"],
            "folder": [f"{address}/texts/"],
            "local": [str(site / "texts")],
        }
        for name, uris in sources.items():
            corpus = publish(write_recipe(tmp_path, *uris, model=model), tmp_path / name).manifest
            digests.add(corpus.content_digest)
            assert corpus.corpus.documents_read == 3 * len(DOCUMENTS)
    assert len(digests) == 1


def test_a_web_server_that_does_not_tell_sizes_loses_no_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with serve_folder(tmp_path, HandlerWithoutSizes) as address:
        source = Source(uri=f"{address}/a.jsonl")
        [file] = list_inputs(source)
        assert file.bytes == 0
        assert read_all(source, split_bytes=100) == DOCUMENTS
    assert "no Last-Modified or ETag for 1 files" in caplog.text  # nothing would show that the file has changed


def test_a_file_on_a_web_server_is_known_by_its_time(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with serve_folder(tmp_path) as address:
        [before] = list_inputs(Source(uri=f"{address}/a.jsonl"))
        os.utime(tmp_path / "a.jsonl", (0, 0))
        [after] = list_inputs(Source(uri=f"{address}/*.jsonl"))
    assert before.version != after.version
    assert "1970" in after.version


def test_a_web_server_that_is_down_or_lacks_the_file(tmp_path: Path) -> None:
    with serve_folder(tmp_path) as address, pytest.raises(ArtifactError, match=r"a\.jsonl: "):
        list_inputs(Source(uri=f"{address}/a.jsonl"))
    with pytest.raises(ArtifactError, match=r"a\.jsonl: .*onnect"):
        list_inputs(Source(uri=f"{address}/a.jsonl"))


CREDENTIALS = base64.b64encode(b"reader:secret").decode()


class HandlerWithPassword(QuietHandler):
    def do_GET(self) -> None:
        if self.headers.get("Authorization") == f"Basic {CREDENTIALS}":
            super().do_GET()
        else:
            self.send_error(401)

    def do_HEAD(self) -> None:
        self.do_GET()


def test_a_bug_is_not_reported_as_a_remote_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    monkeypatch.delattr("services.tokenizer.sources.jsonl._parse")
    with serve_folder(tmp_path) as address, pytest.raises(NameError):
        read_all(Source(uri=f"{address}/a.jsonl"))


def test_a_password_comes_from_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    write_jsonl(tmp_path / "site" / "a.jsonl", DOCUMENTS)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login reader password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    settings: dict[str, Any] = {"tokenizer__train__vocab_size": 310, "model__vocab_size": 310}
    with serve_folder(tmp_path / "site", HandlerWithPassword) as address:
        recipe = write_recipe(tmp_path, f"{address}/a.jsonl", **settings)
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        assert run(recipe, tmp_path / "without") == 3
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        assert publish(recipe, tmp_path / "fsx").manifest.corpus.documents_read == len(DOCUMENTS)


# The Hugging Face hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("uri", "revision", "expected"),
    [
        ("hf://datasets/owner/name", COMMIT, f"hf://datasets/owner/name@{COMMIT}"),
        ("hf://datasets/owner/name/**/*.parquet", "v1.0", "hf://datasets/owner/name@v1.0/**/*.parquet"),
        ("hf://datasets/o/n/x", "refs/convert/parquet", "hf://datasets/o/n@refs%2Fconvert%2Fparquet/x"),
        ("hf://datasets/o/n/images@2x/x.txt", "main", "hf://datasets/o/n@main/images@2x/x.txt"),
        ("hf://owner/model/corpus.txt", "main", "hf://owner/model@main/corpus.txt"),
        ("hf://spaces/owner/name/x", "main", "hf://spaces/owner/name@main/x"),
    ],
)
def test_a_revision_goes_where_the_hubs_file_system_looks_for_it(uri: str, revision: str, expected: str) -> None:
    assert hub.with_revision(uri, revision) == expected
    assert pytest.importorskip("huggingface_hub").parse_hf_uri(expected).revision == revision


@pytest.mark.parametrize("uri", ["hf://datasets/owner/name@main/x", "hf://datasets/name", "hf://datasets", "hf://name"])
def test_a_revision_needs_a_repository_without_one(uri: str) -> None:
    with pytest.raises(RecipeError, match="`revision`"):
        hub.with_revision(uri, "main")


def test_a_branch_is_warned_about_and_a_commit_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hub.with_revision("hf://datasets/owner/name/x", COMMIT)
        assert not caplog.records
        hub.with_revision("hf://datasets/owner/name/x", "main")
    assert "'main'" in caplog.text


@pytest.mark.parametrize("uri", ["some/folder", "pydoc://", "s3://bucket/a.jsonl"])
def test_a_revision_of_what_has_none_is_refused(tmp_path: Path, uri: str) -> None:
    assert run(write_recipe(tmp_path, {"uri": uri, "revision": "main"}), tmp_path / "fsx") == 2


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
    """A folder like a data set on the hub: a card, two subsets, and files in several folders."""
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


def test_a_subset_and_split_are_the_files_that_the_card_names(tmp_path: Path, model: Path, data_set: Path) -> None:
    train = {"uri": f"datasets://{data_set}", "subset": "english", "split": "train"}
    named = publish(write_recipe(tmp_path, train, model=model), tmp_path / "named").manifest
    files = (data_set / "en" / "train-*.parquet", data_set / "more")
    direct = publish(write_recipe(tmp_path, *files, model=model), tmp_path / "files").manifest
    assert named.content_digest == direct.content_digest
    assert named.corpus.documents_read == 30
    documents = [document.decode() for document in make_documents(50)]
    test = Source(uri=f"datasets://{data_set}", subset="english", split="test")
    assert read_all(test) == documents[30:40]


@pytest.mark.parametrize(
    ("keys", "exit_code"),
    [
        ({"subset": "english", "split": "validation"}, 3),
        ({"subset": "french"}, 3),
        ({"subset": "english", "revision": "main"}, 2),
    ],
)
def test_what_a_data_set_does_not_have(tmp_path: Path, data_set: Path, keys: dict[str, str], exit_code: int) -> None:
    assert run(write_recipe(tmp_path, {"uri": f"datasets://{data_set}", **keys}), tmp_path / "fsx") == exit_code
