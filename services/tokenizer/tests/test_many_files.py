"""Planning and reading a corpus of many files: requests are counted, and shared among the workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from services.common.launch import inline
from services.common.launch.launcher import Launcher
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.tokenizer.corpus_inputs import list_corpus_inputs
from services.tokenizer.partition_plan import PlanFolder, plan_partitions
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.sources.input_files import BLOCK_FILES
from services.tokenizer.tasks import TaskSequence, map_largest_first
from services.tokenizer.tests import virtual_time
from services.tokenizer.tests.builders import write_recipe
from services.tokenizer.tests.virtual_time import CountingFileSystem, VirtualLauncher

LINE = b'{"text": "a document of a million"}\n'
REQUESTS_PER_FILE = 2
"""An encode task opens a file, and asks at the end whether it has changed. The plan opens one small file of a block."""


@pytest.fixture
def store() -> Iterator[CountingFileSystem]:
    made = virtual_time.register()
    yield made
    CountingFileSystem.forget()


def fill(store: CountingFileSystem, num_files: int) -> None:
    for number in range(num_files):
        store.pipe_file(f"/texts/{number:06d}.jsonl", LINE)
    store.requests.update(dict.fromkeys(store.requests, 0))


def recipe_over_store(folder: Path, files_per_partition: int) -> Recipe:
    return load_recipe(
        write_recipe(
            folder,
            "counting://texts",
            corpus__split_bytes=files_per_partition * len(LINE),
            tokenizer__num_workers=16,
        )
    )


def read_partition(task: tuple[Path, int]) -> int:
    """Read the documents of a partition as an encode task does, and return their number."""
    partition = PlanFolder(task[0]).read_partition(task[1])
    return sum(map(len, read_documents(partition.file_ranges, "reject", 1_000)))


def read_all(plan: PlanFolder, launcher: Launcher, num_workers: int) -> int:
    partitions = plan.read_partitions()
    tasks = TaskSequence(len(partitions), lambda index: (plan.path, index))
    return sum(
        count for _, count in map_largest_first(launcher, read_partition, tasks, partitions["bytes"], num_workers)
    )


def count_requests(folder: Path, store: CountingFileSystem, num_files: int, num_workers: int) -> tuple[int, int]:
    """Plan and read `num_files` files. Return the number of requests, and of those in a row on the slowest way."""
    fill(store, num_files)
    recipe = recipe_over_store(folder, files_per_partition=64)
    recipe = recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update={"num_workers": num_workers})})
    launcher = VirtualLauncher()

    inputs = list_corpus_inputs(recipe)
    plan = plan_partitions(folder / "plan", recipe, inputs.listings, cast("Launcher", launcher))
    assert read_all(plan, cast("Launcher", launcher), num_workers) == num_files

    return store.count(), store.count() - launcher.saved


def test_workers_share_the_requests_for_the_files(tmp_path: Path, store: CountingFileSystem) -> None:
    requests, in_a_row = count_requests(tmp_path, store, num_files=4 * BLOCK_FILES, num_workers=4)
    assert 0 <= requests - REQUESTS_PER_FILE * 4 * BLOCK_FILES <= 5 + 4  # those of the folder, and of the blocks
    assert requests > 3.9 * in_a_row


@pytest.mark.slow
def test_16_workers_share_the_requests_for_100_000_files(tmp_path: Path, store: CountingFileSystem) -> None:
    requests, in_a_row = count_requests(tmp_path, store, num_files=100_000, num_workers=16)
    assert 0 <= requests - REQUESTS_PER_FILE * 100_000 <= 5 + 100_000 / BLOCK_FILES + 1
    assert requests > 14 * in_a_row


@pytest.mark.parametrize("damaged", ["files", "ranges", "partitions", "plan.json"])
def test_a_damaged_plan_is_made_anew(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.jsonl").write_bytes(LINE * number)
    recipe = load_recipe(write_recipe(tmp_path, tmp_path / "texts", corpus__split_bytes=len(LINE)))
    listings = list_corpus_inputs(recipe).listings
    plan = plan_partitions(tmp_path / "plan", recipe, listings, inline)
    expected = [plan.read_partition(index) for index in range(len(plan.read_partitions()))]
    content = bytearray((plan.path / damaged).read_bytes())
    content[len(content) // 2] ^= 1
    (plan.path / damaged).write_bytes(content)

    again = plan_partitions(tmp_path / "plan", recipe, listings, inline)

    assert [again.read_partition(index) for index in range(len(again.read_partitions()))] == expected
    assert again.is_finished()


def test_the_largest_task_starts_first_and_what_can_be_split_is_split(tmp_path: Path) -> None:
    """A compressed file is one task, which would keep all other workers waiting if it was the last one."""
    import gzip  # noqa: PLC0415

    (tmp_path / "texts").mkdir()
    for name, lines in (("a", 10), ("b", 10), ("m", 400), ("y", 10)):
        (tmp_path / "texts" / f"{name}.jsonl").write_bytes(LINE * lines)
    incompressible = b"".join(b'{"text": "%d"}\n' % (number**9) for number in range(4_000))
    (tmp_path / "texts" / "z.jsonl.gz").write_bytes(gzip.compress(incompressible))
    recipe = load_recipe(write_recipe(tmp_path, tmp_path / "texts", corpus__split_bytes=100 * len(LINE)))
    plan = plan_partitions(tmp_path / "plan", recipe, list_corpus_inputs(recipe).listings, inline)
    partitions = plan.read_partitions()
    started = []

    def start(index: int) -> None:
        started.append([each.file.name for each in plan.read_partition(index).file_ranges])

    list(map_largest_first(inline, start, range(len(partitions)), partitions["bytes"], 1))

    assert started[0] == ["z.jsonl.gz"]
    assert started.count(["m.jsonl"]) >= 3
    assert started[-1] != ["z.jsonl.gz"]
