"""The manifest says how many n-grams of the validation split are in the training split, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.artifacts.corpus import Split, Vocabulary
from services.common.launch import inline
from services.common.recipe.schema import Corpus, Source
from services.tokenizer import ngram_overlap
from services.tokenizer.encode_task import EncodedPart, EncodedPartition, EncodeTask
from services.tokenizer.encoded_partitions import EncodedPartitions
from services.tokenizer.ngram_overlap import NgramOverlap, count_overlap
from services.tokenizer.partition_plan import PARTITION
from services.tokenizer.tasks import map_array
from services.tokenizer.tests.builders import make_text, published, read_stream, run, write_documents, write_recipe

BOS, EOS, N = 1, 2, 13
CORPUS = Corpus(name="test", sources=(Source(uri="/text"),), sequence_length=8)


def ngrams_of(documents: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """List the n-grams of documents that have BOS and EOS."""
    return [tuple(ids[at : at + N]) for ids in documents for at in range(1, len(ids) - N)]


def count_naively(train: Sequence[Sequence[int]], validation: Sequence[Sequence[int]]) -> NgramOverlap:
    in_train, ngrams = set(ngrams_of(train)), ngrams_of(validation)
    return NgramOverlap(len(ngrams), sum(ngram in in_train for ngram in ngrams))


@dataclass(frozen=True)
class Encoded:
    """Partitions as encode tasks leave them: files of tokens and of the positions where documents begin."""

    folder: Path
    vocab_size: int

    def write(self, *partitions: dict[Split, list[list[int]]]) -> tuple[list[EncodeTask], EncodedPartitions]:
        """Write partitions, each of another source."""
        self.folder.mkdir()
        planned = np.zeros(len(partitions), PARTITION)
        planned["source"] = range(len(partitions))
        tasks, results = [], EncodedPartitions(planned)
        for index, documents in enumerate(partitions):
            task, encoded = self._write(index, documents)
            tasks.append(task)
            results.add(index, encoded)
        return tasks, results

    def _write(self, index: int, documents: dict[Split, list[list[int]]]) -> tuple[EncodeTask, EncodedPartition]:
        vocabulary = Vocabulary(
            kind="sentencepiece", path="m", sha256="0" * 64, vocab_size=self.vocab_size, bos_id=BOS, eos_id=EOS
        )
        task = EncodeTask(
            index=index,
            plan=self.folder,
            scratch=self.folder,
            vocabulary_path=self.folder / "m",
            vocabulary=vocabulary,
            encoder="auto",
            sampled_bytes=0,
            corpus=CORPUS,
            duplicates=None,
        )
        task.marker_path.parent.mkdir(exist_ok=True)
        parts: dict[Split, EncodedPart] = {}
        for split, listed in documents.items():
            sizes = [len(ids) for ids in listed]
            tokens = np.array(list(chain(*listed)), np.uint16 if self.vocab_size <= 2**16 else np.uint32)
            task.tokens_path(split).write_bytes(tokens.tobytes())
            task.starts_path(split).write_bytes((np.cumsum(sizes) - sizes).astype(np.int64).tobytes())
            parts[split] = EncodedPart(
                documents=len(listed),
                text_bytes=0,
                document_tokens=sum(sizes) - 2 * len(listed),
                tokens_xxh3=f"{index}",
                starts_xxh3="",
            )
        encoded = EncodedPartition(
            index=index,
            key="",
            encoder="",
            text_xxh3="0" * 32,
            bad_files=(),
            files_repaired=(),
            files_without_text=(),
            max_document_bytes=100,
            parts=parts,
            counts={"documents_duplicate": 0},
        )
        task.marker_path.write_bytes(encoded.model_dump_json().encode())
        return task, encoded


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
    partitions: list[dict[Split, list[list[int]]]] = [
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
        tasks, encoded = Encoded(tmp_path / f"{block_tokens}", vocab_size).write(*partitions)
        assert count_overlap(tasks, encoded, inline, 1) == expected


def test_a_large_validation_split_is_sampled(tmp_path: Path) -> None:
    """The share of the n-grams that are in train stays, within the error of 1,000 n-grams."""
    chosen = random.Random(1)

    def make(count: int) -> list[list[int]]:
        return [[BOS, *(chosen.randrange(3, 300) for _ in range(100)), EOS] for _ in range(count)]

    shared = make(40)
    held_out = [[*ids[:51], *others[51:]] for ids, others in zip(shared, make(40), strict=True)] + make(60)
    tasks, encoded = Encoded(tmp_path / "all", 300).write({"train": shared, "validation": held_out})

    [exact] = count_overlap(tasks, encoded, inline, 1)
    [sampled] = count_overlap(tasks, encoded, inline, 1, max_ngrams=1_000)
    assert exact == count_naively(shared, held_out)
    assert 800 < sampled.ngrams < 1_000
    assert sampled.ngrams_in_train / sampled.ngrams == pytest.approx(exact.ngrams_in_train / exact.ngrams, abs=0.05)
    assert exact.ngrams_in_train / exact.ngrams == pytest.approx(40 * 38 / 8_800)


def write_text(folder: Path) -> Path:
    """Write documents with a paragraph that most of them share."""
    return write_documents(folder, [make_text(300, seed=n) + make_text(150, seed=-1) for n in range(120)])


def test_the_manifest_has_the_counts_of_the_stored_corpus(tmp_path: Path) -> None:
    """One worker and two workers count the same."""
    made = []
    text = write_text(tmp_path / "text")
    for workers, split_bytes in ((1, 10**9), (2, 40_000)):
        recipe = write_recipe(
            tmp_path,
            text,
            corpus__validation_fraction=0.2,
            corpus__split_bytes=split_bytes,
            tokenizer__num_workers=workers,
        )
        assert run(recipe, tmp_path / f"fsx-{workers}") == 0
        made.append(published(tmp_path / f"fsx-{workers}"))

    counts = made[0].manifest.corpus
    naive = count_naively(*(read_stream(made[0].path, split).documents for split in ("train", "validation")))
    assert (counts.validation_ngrams, counts.validation_ngrams_in_train) == (naive.ngrams, naive.ngrams_in_train)
    assert naive.ngrams_in_train > 500
    assert made[1].manifest.corpus.sources == counts.sources
    assert made[1].manifest.content_digest == made[0].manifest.content_digest


def test_every_token_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work grows with the tokens, and not with the number of partitions times the size of the validation split."""
    chosen = random.Random(2)
    partitions: list[dict[Split, list[list[int]]]] = [
        {"train": [make_ids(chosen, 300, 40)], "validation": [make_ids(chosen, 300, 40)]} for _ in range(8)
    ]
    tasks, encoded = Encoded(tmp_path / "scratch", 300).write(*partitions)
    mapped: list[Path] = []

    def map_and_record(path: Path, dtype: Any) -> Any:
        mapped.append(path)
        return map_array(path, dtype)

    monkeypatch.setattr(ngram_overlap, "map_array", map_and_record)
    count_overlap(tasks, encoded, inline, 1)

    times = {split: [mapped.count(task.tokens_path(split)) for task in tasks] for split in ("train", "validation")}
    assert times == {"train": [1] * 8, "validation": [1] * 8}
