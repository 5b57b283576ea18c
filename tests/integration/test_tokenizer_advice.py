"""A corpus whose ids mean other text is refused, and its text, tokenized as the message says, goes with the first."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact, find_artifact
from services.common.artifacts.upstream import open_corpora, open_corpus
from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.file import load_recipe
from services.common.testing.artifacts import publish_checkpoint
from services.tokenizer.tests.builders import TEXTS, run, write_jsonl, write_recipe
from services.tokenizer.tests.tokenizer_folders import byte_level, save, write_qwen
from services.trainer.job import describe_corpora
from services.trainer.runs.branch import require_same_vocabulary

Keys = dict[str, Any]


def write_no_eos(folder: Path) -> None:
    save(folder, byte_level(["<s>", "[END]"]))


TOKENIZERS: dict[str, tuple[Callable[[Path], None], str, Keys]] = {
    "a folder": (write_qwen, "", {}),
    "a folder with an EOS of the recipe": (write_no_eos, "", {"tokenizer__eos_token": "[END]"}),
    "a tokenizer.json": (
        write_no_eos,
        "tokenizer.json",
        {"tokenizer__bos_token": "<s>", "tokenizer__eos_token": "[END]"},
    ),
}


def tokenize(folder: Path, name: str, **changes: Any) -> Artifact[CorpusManifest]:
    source = write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
    path = write_recipe(folder, source, **{"corpus__name": name, **changes})
    assert run(path, folder / "fsx") == 0
    return find_artifact(folder / "fsx", "corpus", name, load_recipe(path), CorpusManifest, "")


def mix(folder: Path, first: Artifact[CorpusManifest], second: Artifact[CorpusManifest], size: int) -> None:
    mixture = {each.manifest.name: 1 for each in (first, second)}
    keys: Keys = {"corpus__name": "first", "train__mixture": mixture, "model__vocab_size": size}
    keys |= {"tokenizer__train__vocab_size": size}
    path = write_recipe(folder, folder / "first.jsonl", **keys)
    open_corpora(load_recipe(path), path, folder / "fsx", first.path)


def branch(folder: Path, first: Artifact[CorpusManifest], second: Artifact[CorpusManifest], size: int) -> None:
    keys: Keys = {"model__vocab_size": size, "tokenizer__train__vocab_size": size}
    before = load_recipe(write_recipe(folder, folder / "first.jsonl", corpus__name="first", **keys))
    link = first.manifest.link(first.path)
    checkpoint = folder / "fsx/checkpoint"
    parent = publish_checkpoint(folder / "fsx", before, 10 + len(list(checkpoint.glob("*/*"))), inputs=(link,))
    path = write_recipe(folder, folder / "second.jsonl", corpus__name="second", **keys)
    recipe = load_recipe(path)
    corpus = describe_corpora(recipe, {"second": open_corpus(recipe, path, folder / "fsx", second.path)})
    require_same_vocabulary(folder / "fsx", parent, recipe, corpus)


@pytest.mark.parametrize("combine", [mix, branch])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_is_tokenized_again_as_the_refusal_says(tmp_path: Path, kind: str, combine: Callable[..., None]) -> None:
    write, name, keys = TOKENIZERS[kind]
    given = tmp_path / "given"
    given.mkdir()
    write(given)
    if name:
        given = (given / name).rename(tmp_path / name)
    size = 501 if write is write_qwen else 500
    settings: Keys = {"model__vocab_size": size}
    first = tokenize(tmp_path, "first", tokenizer__model=str(given), **settings, **keys)
    second = tokenize(tmp_path, "second", tokenizer__train__vocab_size=size, **settings)

    with pytest.raises((ArtifactError, RecipeError)) as caught:
        combine(tmp_path, first, second, size)

    section = tomllib.loads(str(caught.value).partition("\n\n")[2])["tokenizer"]
    advised = tokenize(tmp_path, "second", **settings, **{f"tokenizer__{key}": each for key, each in section.items()})
    assert advised.manifest.corpus.vocabulary.sha256 == first.manifest.corpus.vocabulary.sha256
    combine(tmp_path, first, advised, size)
