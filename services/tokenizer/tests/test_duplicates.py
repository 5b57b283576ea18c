"""Exact duplicates are found as a set of all earlier documents finds them, and `corpus.duplicates = "drop"`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.launch import inline
from services.common.recipe.file import load_recipe
from services.common.testing.seeds import draw_seed
from services.tokenizer.document_hashes import normalise
from services.tokenizer.duplicates import find_duplicates
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.tests.builders import (
    decode_documents,
    make_documents,
    make_text,
    published,
    run,
    write_documents,
    write_plan,
    write_recipe,
)

LEAST_BYTES = 3
TEXTS = [b"", b" ", b"\n", b"ab", b" a ", b"a\xff", b"a\xef\xbf\xbd", b"one\r\ntwo\r", b"one\ntwo", b" one\ntwo\n\n"]


class Finder:
    """Finds the duplicates among documents that are in files."""

    def __init__(self, folder: Path, documents: Sequence[bytes]) -> None:
        self.folder, self.documents = folder, documents
        self._text = write_documents(folder / "text", documents)

    def find(self, *, split_bytes: int, **limits: int) -> list[int]:
        """Return the numbers of the duplicates among all documents."""
        recipe = write_recipe(
            self.folder, self._text, corpus__split_bytes=split_bytes, corpus__min_document_bytes=LEAST_BYTES
        )
        corpus = load_recipe(recipe).corpus
        plan = write_plan(self.folder / f"plan-{split_bytes}", load_recipe(recipe))
        partitions = [plan.read_partition(index) for index in range(len(plan.read_partitions()))]
        folder = self.folder / f"{split_bytes}"
        folder.mkdir(exist_ok=True)
        lists = find_duplicates(folder, plan, corpus, inline, 1, **limits)
        found: list[int] = []
        num_read = 0
        for partition in partitions:
            found += (num_read + lists.read(partition.first_pass_index)).tolist()
            num_read += sum(map(len, read_documents(partition.file_ranges, "replace", corpus.max_document_bytes)))
        return found


def find_naively(documents: Sequence[bytes]) -> list[int]:
    """Return the numbers of the documents whose normalised bytes an earlier document has that counts."""
    seen: set[bytes] = set()
    found = []
    for number, stored in enumerate(documents):
        document = stored.decode(errors="replace").encode()
        if len(document) < LEAST_BYTES:
            continue
        if normalise(document) in seen:
            found.append(number)
        seen.add(normalise(document))
    return found


@pytest.mark.parametrize(
    ("document", "other", "are_equal"),
    [
        (b"a b", b"\n\t a b\r\n \x0b\x0c", True),
        (b"a\r\nb\rc", b"a\nb\nc", True),
        (b" \n", b"", True),
        (b"a b", b"a  b", False),
        (b"a b", b"A b", False),
        (b"a b", b"a b.", False),
        (b"a", "a\u00a0".encode(), False),
        ("é".encode(), "e\u0301".encode(), False),
    ],
)
def test_only_line_ends_and_white_space_at_the_ends_may_differ(document: bytes, other: bytes, are_equal: bool) -> None:
    assert (normalise(document) == normalise(other)) is are_equal


def test_any_partitions_groups_and_buckets_find_what_a_set_finds(tmp_path: Path) -> None:
    chosen = random.Random(draw_seed())
    texts = TEXTS + [b"text %d" % number for number in range(20)]
    documents = [chosen.choice(texts) + chosen.choice([b"", b"", b"\n"]) for _ in range(120)]
    finder, expected = Finder(tmp_path, documents), find_naively(documents)
    assert 60 < len(expected) < 110

    for split_bytes in (1, 100, 10**6):
        assert finder.find(split_bytes=split_bytes) == expected
        assert finder.find(split_bytes=split_bytes, digests_per_bucket=7, max_groups=4) == expected
        assert finder.find(split_bytes=split_bytes, digests_per_bucket=1, max_groups=1) == expected


def test_a_repeated_command_runs_the_tasks_alone_whose_file_is_damaged(tmp_path: Path) -> None:
    """A killed command leaves some files, and their tasks are not run again."""
    finder = Finder(tmp_path, [b"text %d" % (number % 20) for number in range(40)])
    found = finder.find(split_bytes=50, digests_per_bucket=10)
    files = sorted((tmp_path / "50" / "000").iterdir())
    before = [path.stat().st_ino for path in files]
    assert {path.suffix for path in files} == {".digests", ".bucket", ".json"}

    damaged = [files[0].with_name(name) for name in ("000001.digests", "000001.bucket")]
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert finder.find(split_bytes=50, digests_per_bucket=10) == found == list(range(20, 40))

    after = [path.stat().st_ino for path in files]
    made_again = {path for path, old, new in zip(files, before, after, strict=True) if old != new}
    assert made_again == {*damaged, *(path.with_name(f"{path.name}.json") for path in damaged)}
    assert finder.find(split_bytes=50, digests_per_bucket=3) == found


class Text:
    """Sources of documents with weights, and a recipe that drops their exact duplicates."""

    def __init__(self, folder: Path, model: Path | None, *sources: tuple[Sequence[bytes], float]) -> None:
        self._folder, self._model, self._tables = folder, model, ""
        for number, (documents, weight) in enumerate(sources):
            path = folder / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"text": document.decode()}) + "\n" for document in documents))
            self._tables += f'[[corpus.sources]]\nuri = "{path}"\nweight = {weight}\n'

    def write_recipe(self, **settings: Any) -> Path:
        return write_recipe(
            self._folder, sources=self._tables, model=self._model, corpus__duplicates="drop", **settings
        )

    def publish(self, name: str, **settings: object) -> tuple[Path, CorpusManifest]:
        root = self._folder / name
        assert run(self.write_recipe(**settings), root) == 0
        corpus = published(root)
        return corpus.path, corpus.manifest


def find_first_ones(documents: Sequence[bytes]) -> list[bytes]:
    """Return the first of all documents with equal normalised bytes, by a set."""
    first: dict[bytes, bytes] = {}
    for document in documents:
        first.setdefault(normalise(document), document)
    return list(first.values())


def make_repeated(chosen: random.Random, count: int) -> list[bytes]:
    """Draw documents of few texts, with other line ends and white space around some."""
    texts = [make_text(chosen.randint(10, 60), seed=seed).strip() for seed in range(count // 3)]
    return [chosen.choice(texts) + chosen.choice([b"", b"", b"\n", b" \r\n"]) for _ in range(count)]


def test_the_first_source_keeps_a_document_and_every_pass_drops_the_same(tmp_path: Path, model: Path) -> None:
    x, y, z, w = make_documents(4)
    text = Text(tmp_path, model, ([x, y, x, z + b"\n"], 2), ([b"\r\n" + y, w, z], 1))

    path, manifest = text.publish("fsx", corpus__split_bytes=1_000)

    assert decode_documents(path, "train") == [x, y, z + b"\n", w, x, y, z + b"\n"]
    assert manifest.corpus.documents_read == 2 * 4 + 3
    assert [source.documents_duplicate for source in manifest.corpus.sources] == [2, 2]
    assert "duplicates" in {phase.name for phase in manifest.corpus.phases}


@pytest.mark.parametrize("runs", [((10**9, 1), (1_000, 2)), pytest.param(((10**9, 1), (1, 4)), marks=pytest.mark.slow)])
def test_any_partitions_and_processes_keep_what_a_set_keeps(
    tmp_path: Path, model: Path, runs: Sequence[tuple[int, int]]
) -> None:
    chosen = random.Random(draw_seed())
    left, right = make_repeated(chosen, 90), make_repeated(chosen, 60)
    text = Text(tmp_path, model, (left, 1), (right, 1))

    made = [
        text.publish(f"{split_bytes}", corpus__split_bytes=split_bytes, corpus__validation_fraction=0.3,
                     tokenizer__num_workers=workers)
        for split_bytes, workers in runs
    ]  # fmt: skip

    path, manifest = made[0]
    train, validation = decode_documents(path, "train"), decode_documents(path, "validation")
    kept = find_first_ones(left + right)
    assert train == [document for document in kept if document not in validation]
    assert validation == [document for document in kept if document in validation]
    assert len(validation) > 3
    assert manifest.corpus.documents_duplicate == len(left + right) - len(kept) > 80
    assert {each.content_digest for _, each in made} == {manifest.content_digest}
    assert [each.corpus.sources for _, each in made[1:]] == [manifest.corpus.sources] * (len(runs) - 1)


def test_short_documents_go_before_duplicates_and_weights_choose_after_them(tmp_path: Path, model: Path) -> None:
    """A document that is too short is no original of a longer one, and a duplicate cannot bring back what is left out.

    Documents without a byte are counted as empty, however many there are.
    """
    shared = make_documents(200, mean_bytes=60)
    shared = [document for document in shared if len(document) >= 20]
    left = [b"", b"", b"short", b"short", *shared]
    right = [b"short".center(20), b"short", *shared]
    text = Text(tmp_path, model, (left, 0.5), (right, 1))

    path, manifest = text.publish("fsx", corpus__min_document_bytes=20)
    counts, kept = manifest.corpus, decode_documents(path, "train")

    assert kept == [document for document in [*shared, b"short".center(20)] if document in set(kept)]
    assert kept[-1] == b"short".center(20)
    assert 0.3 * len(shared) < len(kept) < 0.7 * len(shared)
    assert (counts.documents_too_short, counts.documents_duplicate, counts.documents_empty) == (5, len(shared), 0)
    assert counts.documents_not_sampled == len(shared) + 1 - len(kept)

    counts = text.publish("other")[1].corpus
    assert (counts.documents_too_short, counts.documents_empty) == (0, 2)
    assert counts.documents_duplicate == len(shared) + 3
