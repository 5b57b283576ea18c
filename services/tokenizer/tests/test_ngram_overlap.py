"""The manifest says how many n-grams of the validation split are in the training split, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from services.common.artifacts.corpus import Split
from services.common.launch import inline
from services.tokenizer import ngram_overlap
from services.tokenizer.encode_task import EncodedPartitions, starts_path, tokens_path
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.ngram_overlap import NgramOverlap, count_overlap
from services.tokenizer.partition_plan import PARTITION
from services.tokenizer.tests.builders import make_text, published, read_stream, run, write_documents, write_recipe

BOS, EOS, N = 1, 2, 13


def ngrams_of(documents: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """List the n-grams of documents that have BOS and EOS."""
    return [tuple(ids[at : at + N]) for ids in documents for at in range(1, len(ids) - N)]


def count_naively(train: Sequence[Sequence[int]], validation: Sequence[Sequence[int]]) -> NgramOverlap:
    in_train, ngrams = set(ngrams_of(train)), ngrams_of(validation)
    return NgramOverlap(len(ngrams), sum(ngram in in_train for ngram in ngrams))


Documents = dict[Split, list[list[int]]]


def write_encoded(folder: Path, vocab_size: int, *partitions: Documents) -> EncodedPartitions:
    """Write the files of partitions as encode tasks do, each partition of another source."""
    planned = np.zeros(len(partitions), PARTITION)
    planned["source"] = range(len(partitions))
    encoded = EncodedPartitions(planned)
    (folder / "000").mkdir(parents=True)
    for index, splits in enumerate(partitions):
        for split, documents in splits.items():
            sizes = [len(ids) for ids in documents]
            tokens = np.array(list(chain(*documents)), token_dtype(vocab_size))
            tokens_path(folder, index, split).write_bytes(tokens.tobytes())
            starts_path(folder, index, split).write_bytes((np.cumsum(sizes) - sizes).astype(np.int64).tobytes())
            encoded.documents[split][index] = len(documents)
            encoded.document_tokens[split][index] = sum(sizes) - 2 * len(documents)
    return encoded


def make_ids(chosen: random.Random, vocab_size: int, longest: int) -> list[int]:
    """A document of few distinct tokens, so that n-grams occur again by chance; BOS and EOS may be in its text."""
    ids = chosen.choices([vocab_size - 1, vocab_size - 2, BOS, EOS], [85, 10, 3, 2], k=chosen.randint(1, longest))
    return [BOS, *ids, EOS]


@pytest.mark.parametrize(("vocab_size", "longest"), [(300, 40), (300, 400), (70_000, 40)])
def test_counts_are_those_of_sets_of_n_grams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab_size: int, longest: int
) -> None:
    """Borders of blocks are inside of documents, at their begins and at their ends."""
    chosen = random.Random(longest)
    partitions: list[Documents] = [
        {
            "train": [make_ids(chosen, vocab_size, longest) for _ in range(30)],
            "validation": [make_ids(chosen, vocab_size, longest) for _ in range(5)],
        }
        for _ in range(2)
    ]
    partitions.append({"train": [], "validation": []})
    train = [ids for partition in partitions for ids in partition["train"]]
    expected = [count_naively(train, partition["validation"]) for partition in partitions]
    assert 0 < expected[0].ngrams_in_train < expected[0].ngrams

    for block_tokens in (2**16, 1, 13):
        monkeypatch.setattr(ngram_overlap, "_BLOCK_TOKENS", block_tokens)
        folder = tmp_path / f"{block_tokens}"
        encoded = write_encoded(folder, vocab_size, *partitions)
        assert count_overlap(folder, vocab_size, encoded, inline, 1) == expected


def test_a_large_validation_split_is_sampled(tmp_path: Path) -> None:
    """The share of the n-grams that are in train stays, within the error of 1,000 n-grams."""
    chosen = random.Random(1)

    def make(count: int) -> list[list[int]]:
        return [[BOS, *(chosen.randrange(3, 300) for _ in range(100)), EOS] for _ in range(count)]

    shared = make(40)
    held_out = [[*ids[:51], *others[51:]] for ids, others in zip(shared, make(40), strict=True)] + make(60)
    encoded = write_encoded(tmp_path, 300, {"train": shared, "validation": held_out})

    [exact] = count_overlap(tmp_path, 300, encoded, inline, 1)
    [sampled] = count_overlap(tmp_path, 300, encoded, inline, 1, max_ngrams=1_000)
    assert exact == count_naively(shared, held_out)
    assert 800 < sampled.ngrams < 1_000
    assert sampled.ngrams_in_train / sampled.ngrams == pytest.approx(exact.ngrams_in_train / exact.ngrams, abs=0.05)
    assert exact.ngrams_in_train / exact.ngrams == pytest.approx(40 * 38 / 8_800)


def test_the_manifest_has_the_counts_of_the_stored_corpus(tmp_path: Path) -> None:
    """One worker and two workers count the same."""
    made = []
    documents = [make_text(300, seed=n) + make_text(150, seed=-1) for n in range(120)]  # they share a paragraph
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", documents), corpus__validation_fraction=0.2)
    for workers, split_bytes in ((1, 10**9), (2, 40_000)):
        options = f"--tokenizer.num_workers={workers}", f"--corpus.split_bytes={split_bytes}"
        assert run(recipe, tmp_path / f"fsx-{workers}", *options) == 0
        made.append(published(tmp_path / f"fsx-{workers}"))

    counts = made[0].manifest.corpus
    naive = count_naively(*(read_stream(made[0].path, split).documents for split in ("train", "validation")))
    assert (counts.validation_ngrams, counts.validation_ngrams_in_train) == (naive.ngrams, naive.ngrams_in_train)
    assert naive.ngrams_in_train > 500
    assert made[1].manifest.corpus.sources == counts.sources
    assert made[1].manifest.content_digest == made[0].manifest.content_digest
