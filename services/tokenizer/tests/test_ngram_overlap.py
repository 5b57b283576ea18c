"""The manifest says how many n-grams of the validation split are in the training split, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.tokenizer import ngram_overlap
from services.tokenizer.ngram_overlap import count_overlap
from services.tokenizer.tests.builders import publish, read_stream, write_jsonl, write_recipe

N, WORDS = 13, 300


def write_word_vocabulary(folder: Path, first_id: int) -> dict[str, Any]:
    """Write a vocabulary of WORDS words with ids from `first_id` on, and return the keys of a recipe for it."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": first_id + number for number in range(WORDS)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return {"tokenizer__model": str(folder / "tokenizer.json"), "model__vocab_size": first_id + WORDS}


def ngrams_of(documents: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """List the n-grams of documents that have BOS and EOS."""
    return [tuple(ids[at : at + N]) for ids in documents for at in range(1, len(ids) - N)]


def count_naively(corpus: Artifact[CorpusManifest]) -> list[tuple[int, int]]:
    """Count the n-grams of each source's validation documents, and those of them that are in train."""
    in_train, validation = (
        set(ngrams_of(read_stream(corpus.path, "train").documents)),
        read_stream(corpus.path, "validation"),
    )
    counts = []
    for tokens in corpus.manifest.corpus.validation_ranges:
        bounds = [at for at in [*validation.starts, len(validation.tokens)] if tokens.start <= at <= tokens.stop]
        ngrams = ngrams_of([validation.tokens[begin:end].tolist() for begin, end in pairwise(bounds)])
        counts.append((len(ngrams), sum(ngram in in_train for ngram in ngrams)))
    return counts


def counts_of(corpus: Artifact[CorpusManifest]) -> list[tuple[int, int]]:
    return [(each.validation_ngrams, each.validation_ngrams_in_train) for each in corpus.manifest.corpus.sources]


@pytest.mark.parametrize(("first_id", "longest"), [(300, 40), (300, 300), (70_000, 40)])
def test_counts_are_those_of_sets_of_n_grams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_id: int, longest: int
) -> None:
    """Documents have few distinct words. Borders of blocks are inside of documents, at their begins and their ends."""
    chosen = random.Random(longest)
    texts = [" ".join(chosen.choices(["w0", "w1"], [9, 1], k=chosen.randint(1, longest))) for _ in range(120)]
    sources = [write_jsonl(tmp_path / f"{number}.jsonl", texts[number::2]) for number in range(2)]
    settings = write_word_vocabulary(tmp_path, first_id) | {"corpus__validation_fraction": 0.2}
    made: list[Artifact[CorpusManifest]] = []
    for block_tokens, workers, split_bytes in ((2**15, 1, 10**9), (1, 1, 4_000), (N, 1, 4_000), (2**15, 2, 4_000)):
        monkeypatch.setattr(ngram_overlap, "_BLOCK_TOKENS", block_tokens)
        sizes: dict[str, Any] = {"tokenizer__num_workers": workers, "corpus__split_bytes": split_bytes}
        made.append(publish(write_recipe(tmp_path, *sources, **settings, **sizes), tmp_path / f"fsx-{len(made)}"))

    expected = count_naively(made[0])
    assert all(0 < in_train < ngrams for ngrams, in_train in expected)
    assert [counts_of(corpus) for corpus in made] == [expected] * len(made)


def test_a_large_validation_split_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the n-grams that are in train stays, within the error of 1,000 n-grams."""
    chosen = random.Random(1)
    halves = [" ".join(f"w{chosen.randrange(WORDS)}" for _ in range(50)) for _ in range(300)]
    texts = [f"{halves[number % 100]} {half}" for number, half in enumerate(halves)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    recipe = write_recipe(tmp_path, source, **write_word_vocabulary(tmp_path, 300), corpus__validation_fraction=0.3)
    monkeypatch.setattr("services.tokenizer.build.count_overlap", partial(count_overlap, max_ngrams=1_000))

    corpus = publish(recipe, tmp_path / "fsx")

    [(ngrams, in_train)], [(all_ngrams, all_in_train)] = counts_of(corpus), count_naively(corpus)
    assert 800 < ngrams < 1_000 < all_ngrams / 4
    assert in_train / ngrams == pytest.approx(all_in_train / all_ngrams, abs=0.05)
