"""Exact duplicates are found in tasks, as a set of all earlier documents finds them."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.common.launch import inline
from services.common.recipe.file import load_recipe
from services.common.testing.seeds import draw_seed
from services.tokenizer import duplicates
from services.tokenizer.document_hashes import normalise
from services.tokenizer.duplicates import FindTask, find_duplicates
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.tests.builders import write_documents, write_recipe
from services.tokenizer.tests.plans import write_plan

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
            found += (num_read + lists.of_partition(partition.first_pass_index).read()).tolist()
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


def test_texts_without_duplicates_and_no_texts_at_all_have_empty_lists(tmp_path: Path) -> None:
    assert Finder(tmp_path / "distinct", [b"one", b"two", b"three"]).find(split_bytes=1) == []
    assert Finder(tmp_path / "empty", [b"", b""]).find(split_bytes=1) == []
    assert Finder(tmp_path / "none", [b""]).find(split_bytes=1) == []


def test_a_repeated_command_runs_the_tasks_alone_whose_file_is_damaged(tmp_path: Path) -> None:
    """A killed command leaves some files, and their tasks are not run again."""
    finder = Finder(tmp_path, [b"text %d" % (number % 20) for number in range(40)])
    found = finder.find(split_bytes=50, digests_per_bucket=10)
    files = sorted((tmp_path / "50" / "000").iterdir())
    before = [path.stat().st_ino for path in files]
    assert {path.suffix for path in files} == {".digests", ".bucket", ".duplicates", ".json"}

    damaged = [files[0].with_name(name) for name in ("000001.digests", "000001.bucket", "000025.duplicates")]
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert finder.find(split_bytes=50, digests_per_bucket=10) == found == list(range(20, 40))

    after = [path.stat().st_ino for path in files]
    made_again = {path for path, old, new in zip(files, before, after, strict=True) if old != new}
    assert made_again == {*damaged, *(path.with_name(f"{path.name}.json") for path in damaged)}
    assert finder.find(split_bytes=50, digests_per_bucket=3) == found


def test_a_bucket_is_sorted_in_60_bytes_a_digest(tmp_path: Path) -> None:
    count = 100_000
    digests = np.arange(count, dtype=np.uint64)
    (tmp_path / "000").mkdir()
    for group in range(2):
        content = np.concatenate([np.array([count], np.uint64), digests, digests, digests + group * count])
        (tmp_path / "000" / f"{group:06d}.digests").write_bytes(content.tobytes())

    tracemalloc.start()
    try:
        num_found, found = duplicates._find(FindTask(tmp_path, bucket=0, num_buckets=1, num_groups=2, inputs_xxh3=""))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_found == count
    assert np.array_equal(found, digests + count)
    assert peak < 60 * 2 * count
