"""A folder with any tokenizer of Hugging Face gives a corpus of the ids that AutoTokenizer gives."""

from __future__ import annotations

import http.server
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import tokenizers
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
from services.tokenizer.tests.tokenizer_folders import (
    DOCUMENTS,
    KINDS,
    byte_level,
    save,
    write_byte_fallback,
    write_config,
    write_gpt2,
    write_llama3,
    write_qwen,
    write_t5,
)


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


def write_class(name: str, write: Callable[[Path], None], **settings: Any) -> Callable[[Path], None]:
    """Return a function that writes a tokenizer's folder with another class."""

    def write_with_class(folder: Path) -> None:
        write(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        write_config(folder, **config | {"tokenizer_class": name, **settings})

    return write_with_class


def write_pointer(folder: Path) -> None:
    write_qwen(folder)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234567\n"
    (folder / "tokenizer.json").write_text(pointer)


def write_dropout(folder: Path) -> None:
    write_qwen(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(content))


SAMPLING = {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1}


@pytest.mark.parametrize(
    ("write", "settings", "named"),
    [
        (write_none, {}, "tokenizer.json"),
        (write_own_code, {}, "code"),
        (write_no_eos, {}, "tokenizer.eos_token"),
        (write_no_eos, {"tokenizer__eos_token": "[STOP]"}, "[STOP]"),
        (write_two_before, {}, "one"),
        (write_dropout, {}, "dropout"),
        (write_pointer, {}, "lfs pull"),
        (write_class("SiglipTokenizer", write_t5, sp_model_kwargs=SAMPLING), {}, "enable_sampling"),
        (write_class("BertTokenizer", write_qwen), {}, "cannot encode"),
        (write_class("LayoutLMv2Tokenizer", write_qwen), {}, "cannot encode"),
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


CLASSES = {
    "rules of its own": write_class("LlamaTokenizer", write_byte_fallback),
    "another pattern": write_class("GPT2Tokenizer", write_llama3),
    "another pattern for marks": write_class("Qwen3_5Tokenizer", write_qwen),
    "a normaliser": write_class("LukeTokenizer", write_qwen),
    "Python": write_class("ByT5Tokenizer", write_qwen),
    "the file's rules": write_class("Qwen2Tokenizer", write_qwen),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_folder_means_what_autotokenizer_gives_and_its_file_is_refused_where_that_differs(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each advice of the refusal is followed: the folder, or a copy of the file alone."""
    folder, alone = tmp_path / "tokenizer", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    CLASSES[kind](folder)
    file = Path(shutil.copy(folder / "tokenizer.json", alone))
    theirs, own = transformers.AutoTokenizer.from_pretrained(folder), tokenizers.Tokenizer.from_file(str(file))
    own.encode_special_tokens = True
    ids = {
        folder: [theirs(text, split_special_tokens=True, add_special_tokens=False)["input_ids"] for text in DOCUMENTS],
        file: [own.encode(text, add_special_tokens=False).ids for text in DOCUMENTS],
    }
    is_same = ids[folder] == ids[file]
    names = [token for token, _ in sorted(own.get_vocab().items(), key=lambda each: each[1])][:2]
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)

    def tokenize_with(model: Path, size: int, **settings: Any) -> int:
        settings |= {"tokenizer__model": str(model), "model__vocab_size": size}
        return run(write_recipe(tmp_path, source, **settings), tmp_path / f"fsx-{model.parent.name}")

    settings = {"tokenizer__bos_token": names[0], "tokenizer__eos_token": names[1]}
    size = max(own.get_vocab().values()) + 1
    assert tokenize_with(folder / "tokenizer.json", size, **settings) == (0 if is_same else 3)
    assert (type(theirs).__name__ in capsys.readouterr().err) != is_same
    for model, expected in ids.items():
        size = max((theirs if model == folder else own).get_vocab().values()) + 1
        eos = {} if model == folder and theirs.eos_token_id is not None else settings
        assert tokenize_with(model, size, **eos) == 0
        assert (type(theirs).__name__ in capsys.readouterr().err) == (model == folder and not is_same)
        found = published(tmp_path / f"fsx-{model.parent.name}")
        bos = found.manifest.corpus.vocabulary.bos_id is not None
        documents = [each[bos:-1] for each in read_stream(found.path, "train").documents]
        assert documents == [list(each) for each in expected if each]


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


def test_a_repository_of_the_hub_gives_the_corpus_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name without `hf://` is a path, and its refusal says how the hub's is written."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_gpt2(folder)
    local = tokenize(tmp_path, folder)
    size = local.manifest.corpus.vocabulary.vocab_size
    settings: dict[str, Any] = {"tokenizer__model": "owner/name", "model__vocab_size": size}
    assert run(write_recipe(tmp_path, tmp_path / "text.jsonl", **settings), tmp_path / "hub") == 3
    [advised] = re.findall(r"A repository of the hub is (\S+)\.", capsys.readouterr().err)
    settings["tokenizer__model"] = f"{advised}@{COMMIT}"
    recipe = write_recipe(tmp_path, tmp_path / "text.jsonl", **settings)
    with serve(partial(_Hub, directory=str(folder))) as address:
        command = ["-m", "services.tokenizer", "--recipe", str(recipe), "--root", str(tmp_path / "hub")]
        process = start_python([*command, "--launch", "inline"], HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert published(tmp_path / "hub").manifest.content_digest == local.manifest.content_digest
