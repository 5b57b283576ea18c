"""A folder with any tokenizer of Hugging Face gives a corpus of the ids that AutoTokenizer gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import processors

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.common.vocabularies.codec import load_codec
from services.tokenizer.tests.builders import TEXTS, publish, read_stream, run, write_jsonl, write_recipe
from services.tokenizer.tests.tokenizer_folders import DOCUMENTS, KINDS, byte_level, save, write_config


def tokenize(tmp_path: Path, folder: Path) -> Artifact[CorpusManifest]:
    size = max(transformers.AutoTokenizer.from_pretrained(folder).get_vocab().values()) + 1
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    settings = {"tokenizer__model": str(folder), "model__vocab_size": size}
    return publish(write_recipe(tmp_path, source, **settings), tmp_path / "fsx")


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
