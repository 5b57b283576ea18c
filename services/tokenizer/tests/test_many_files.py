"""Planning and reading a corpus of many files: two requests to the store for a file, and the largest task first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from services.common.recipe.file import load_recipe
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.sources.input_files import BLOCK_FILES
from services.tokenizer.tests.builders import write_plan, write_recipe

LINE = b'{"text": "a document of a million"}\n'
REQUESTS_PER_FILE = 2
"""An encode task opens a file, and asks at the end whether it has changed. The plan opens one small file of a block."""


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory, on which a list of a folder, a question about a file and an open are a request each."""

    protocol = "counting"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("counting://", "memory://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.requests.append(f"ls {path}")
        return super().ls(path, detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.requests.append(f"info {path}")
        return super().info(path, **options)

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.requests.append(f"open {path}")
        return super()._open(path, *arguments, **options)


@pytest.fixture
def store() -> Iterator[CountingFileSystem]:
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    yield fsspec.filesystem("counting")
    CountingFileSystem.store.clear()


def test_a_file_costs_two_requests(tmp_path: Path, store: CountingFileSystem) -> None:
    num_blocks = 2
    for number in range(num_blocks * BLOCK_FILES):
        store.pipe_file(f"/texts/{number:06d}.jsonl", LINE)
    recipe = load_recipe(write_recipe(tmp_path, "counting://texts", corpus__split_bytes=64 * len(LINE)))
    store.requests.clear()

    plan = write_plan(tmp_path / "plan", recipe)
    for index in range(len(plan.read_partitions())):
        ranges = plan.read_partition(index).file_ranges
        assert sum(map(len, read_documents(ranges, "reject", 1_000))) == len(ranges)

    # Those of the folder and of the blocks come on top.
    assert 0 <= len(store.requests) - REQUESTS_PER_FILE * num_blocks * BLOCK_FILES <= 5 + num_blocks


@pytest.mark.parametrize("damaged", ["files", "ranges", "partitions", "plan.json"])
def test_a_damaged_plan_is_made_anew(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.jsonl").write_bytes(LINE * number)
    recipe = load_recipe(write_recipe(tmp_path, tmp_path / "texts", corpus__split_bytes=len(LINE)))
    plan = write_plan(tmp_path / "plan", recipe)
    expected = [plan.read_partition(index) for index in range(len(plan.read_partitions()))]
    content = bytearray((plan.path / damaged).read_bytes())
    content[len(content) // 2] ^= 1
    (plan.path / damaged).write_bytes(content)

    again = write_plan(tmp_path / "plan", recipe)

    assert [again.read_partition(index) for index in range(len(again.read_partitions()))] == expected
    assert again.is_finished()
