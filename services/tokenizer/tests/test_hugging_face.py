"""A folder with any tokenizer of Hugging Face gives a corpus of the ids that AutoTokenizer gives."""

from __future__ import annotations

import http.server
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import transformers
from tokenizers import processors

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.common.testing.commands import start_python
from services.common.vocabularies.codec import load_codec
from services.tokenizer.tests.builders import (
    TEXTS,
    publish,
    published,
    read_stream,
    run,
    serve,
    write_jsonl,
    write_recipe,
)
from services.tokenizer.tests.tokenizer_folders import DOCUMENTS, KINDS, byte_level, save, write_config, write_gpt2


def tokenize(tmp_path: Path, folder: Path) -> Artifact[CorpusManifest]:
    size = max(transformers.AutoTokenizer.from_pretrained(folder).get_vocab().values()) + 1
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    recipe = write_recipe(tmp_path, source, tokenizer__model=str(folder), model__vocab_size=size)
    return publish(recipe, tmp_path / "fsx")


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_has_the_ids_of_autotokenizer_and_the_tokenizers_files(tmp_path: Path, kind: str) -> None:
    write, has_bos, encoder = KINDS[kind]
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    corpus = tokenize(tmp_path, folder)

    payload = corpus.manifest.corpus
    unchanged = transformers.AutoTokenizer.from_pretrained(folder)
    special = {token.content for token in unchanged.added_tokens_decoder.values() if token.special}
    special |= set(unchanged.all_special_tokens)
    expected = []
    for text in DOCUMENTS:
        ids = list(unchanged(text, split_special_tokens=True)["input_ids"])
        if not any(name in text for name in special):
            assert ids == list(unchanged(text)["input_ids"])
        ends = [] if ids and ids[-1] == payload.vocabulary.eos_id else [payload.vocabulary.eos_id]
        expected += [[*ids, *ends]] if unchanged(text, add_special_tokens=False)["input_ids"] else []
    assert read_stream(corpus.path, "train").documents == expected
    assert payload.encoder.startswith(encoder)
    assert payload.reference == f"transformers {transformers.__version__}"
    counts = payload.splits["train"]
    assert (counts.documents, counts.bos, counts.eos) == (len(expected), len(expected) if has_bos else 0, len(expected))
    assert (payload.vocabulary.bos_id is not None) == has_bos
    stored = {path.name: path.read_bytes() for path in (corpus.path / "tokenizer").iterdir()}
    assert stored == before
    codec = load_codec(corpus.path / payload.vocabulary.path, payload.vocabulary)
    assert codec.encode(TEXTS[0]) == list(unchanged(TEXTS[0], add_special_tokens=False)["input_ids"])


def write_none(folder: Path) -> None:
    (folder / "model.safetensors").touch()


def write_own_code(folder: Path) -> None:
    write_config(folder, tokenizer_class="MyTokenizer", auto_map={"AutoTokenizer": ["mine.MyTokenizer", None]})


def write_no_eos(folder: Path) -> None:
    save(folder, byte_level(["[END]"]))


def write_two_before(folder: Path) -> None:
    tokenizer = byte_level(["<s>", "<en>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <en> $A", special_tokens=[("<s>", 0), ("<en>", 1)]
    )
    save(folder, tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("write", "settings", "named"),
    [
        (write_none, {}, "tokenizer.json"),
        (write_own_code, {}, "code"),
        (write_no_eos, {}, "tokenizer.eos_token"),
        (write_no_eos, {"tokenizer__eos_token": "[STOP]"}, "[STOP]"),
        (write_two_before, {}, "one"),
    ],
)
def test_a_folder_without_a_tokenizer_that_packs_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
    settings: dict[str, Any],
    named: str,
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write(folder)
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    recipe = write_recipe(tmp_path, source, tokenizer__model=str(folder), **settings)

    assert run(recipe, tmp_path / "fsx") == 3

    message = capsys.readouterr().err
    assert named in message
    assert str(folder) in message


def test_a_recipe_can_name_the_end_of_a_document_and_a_changed_file_is_another_input(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_no_eos(folder)
    source = write_jsonl(tmp_path / "text.jsonl", TEXTS)
    settings: dict[str, Any] = {"model__vocab_size": 500, "tokenizer__eos_token": "[END]"}
    recipe = write_recipe(tmp_path, source, tokenizer__model=str(folder), **settings)
    first = publish(recipe, tmp_path / "first")
    assert (first.manifest.corpus.vocabulary.bos_id, first.manifest.corpus.vocabulary.eos_id) == (None, 0)

    (folder / "weights.bin").touch()
    assert publish(recipe, tmp_path / "again").manifest.id == first.manifest.id
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert publish(recipe, tmp_path / "other").manifest.id != first.manifest.id


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(http.server.SimpleHTTPRequestHandler):
    """Answers as the hub about the repository owner/name at COMMIT, whose files are those of a folder."""

    def do_GET(self) -> None:
        folder = Path(self.directory)
        path = urlsplit(self.path).path
        if path == f"/api/models/owner/name/tree/{COMMIT}":
            files = [{"type": "file", "path": each.name, "size": 1, "oid": "a" * 40} for each in folder.iterdir()]
            self._answer(json.dumps(files).encode())
        elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            self._answer((folder / Path(path).name).read_bytes())
        elif path.startswith("/api/models/owner/name"):
            self._answer(json.dumps({"id": "owner/name", "sha": COMMIT}).encode())
        else:
            self.send_error(404)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_repository_of_the_hub_gives_the_corpus_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_gpt2(folder)
    local = tokenize(tmp_path, folder)
    model = f"hf://owner/name@{COMMIT}"
    size = local.manifest.corpus.vocabulary.vocab_size
    recipe = write_recipe(tmp_path, tmp_path / "text.jsonl", tokenizer__model=model, model__vocab_size=size)
    with serve(partial(_Hub, directory=str(folder))) as address:
        command = ["-m", "services.tokenizer", "--recipe", str(recipe), "--root", str(tmp_path / "hub")]
        process = start_python([*command, "--launch", "inline"], HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert published(tmp_path / "hub").manifest.content_digest == local.manifest.content_digest
