"""The examples of docs/python-api.md run as they stand there, on artifacts that the commands made."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import millrace
from images.platforms import REPOSITORY
from services.common.testing.commands import run_python
from tests.small import write_notes, write_small_recipe

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (REPOSITORY / "docs/python-api.md").read_text(encoding="utf-8"), re.DOTALL
)
QUICK = ("--train.max_steps=2", "--compile.enabled=false", "--parallel.data_parallel_size=1")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe named `tiny-cpu`, and `fsx` with its corpus and its run, made by the command."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "recipes").mkdir()
    recipe = write_small_recipe(folder / "recipes/tiny-cpu.toml", str(write_notes(folder / "notes")))
    recipe.write_text(recipe.read_text(encoding="utf-8").replace('name = "small"', 'name = "tiny-cpu"'))
    for command in ("tokenize", "train"):
        done = run_python(["-m", "millrace", command, str(recipe), "--root", str(folder / "fsx"), *QUICK])
        assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=["recipe", "corpus", "checkpoint"])
def test_an_example_runs_as_it_stands_in_the_page(work: Path, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    assert len(example.strip().splitlines()) <= 10
    exec(example, {})


def test_a_corpus_gives_every_sample_once_and_travels_to_a_spawned_process(work: Path) -> None:
    corpus = millrace.open_corpus(millrace.load_recipe(work / "recipes/tiny-cpu.toml"), work / "fsx", "validation")
    samples = [corpus[index] for index in range(len(corpus))]
    assert {inputs.shape for inputs, _ in samples} == {torch.Size([32])}
    assert all(torch.equal(before[1][-1], after[0][0]) for before, after in pairwise(samples))
    again = pickle.loads(pickle.dumps(corpus))
    assert torch.equal(again[0][0], samples[0][0])
    with pytest.raises(IndexError):
        corpus[len(corpus)]


LONGER = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("overrides", "read", "value"),
    [
        ({"compile.enabled": False}, lambda recipe: recipe.compile.enabled, False),
        ({"name": "2024"}, lambda recipe: recipe.name, "2024"),
        ({"corpus.name": "1e5"}, lambda recipe: recipe.corpus.name, "1e5"),
        ({"model.rope_scaling": LONGER}, lambda recipe: recipe.model.rope_scaling.model_dump(), LONGER),
        ({"corpus.sources": [{"uri": "a"}, {"uri": "b"}]}, lambda recipe: recipe.corpus.sources[1].uri, "b"),
        ({"train.mixture": {"python-docs": 2, "mine": 1}}, lambda recipe: recipe.train.mixture["mine"], 1),
        ({"tokenizer.train": None, "tokenizer.model": "x"}, lambda recipe: recipe.tokenizer.train, None),
        ({"model.rope_scaling": None}, lambda recipe: recipe.model.rope_scaling, None),
    ],
)
def test_overrides_are_values_of_python(overrides: dict[str, Any], read: Callable[[Any], Any], value: Any) -> None:
    assert read(millrace.load_recipe("tiny-cpu", overrides)) == value


@pytest.mark.parametrize("overrides", [{"compile.enabled": "true"}, {"train.max_steps": "500"}])
def test_a_text_is_no_number(overrides: dict[str, Any]) -> None:
    with pytest.raises(millrace.RecipeError, match=next(iter(overrides))):
        millrace.load_recipe("tiny-cpu", overrides)


def test_dir_shows_what_the_package_offers() -> None:
    assert set(dir(millrace)) >= {"load_recipe", "open_corpus", "load_checkpoint", "CorpusDataset", "RecipeError"}


def test_what_is_missing_has_the_errors_of_the_commands(work: Path) -> None:
    with pytest.raises(millrace.RecipeError):
        millrace.load_recipe("no-such-recipe")
    with pytest.raises(millrace.ArtifactError):
        millrace.open_corpus(millrace.load_recipe("tiny-cpu"), work / "elsewhere")
    with pytest.raises(millrace.RecipeError):
        millrace.load_checkpoint("no-such-run", work / "fsx")
