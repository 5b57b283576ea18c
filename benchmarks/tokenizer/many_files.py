"""Measures what a corpus of many files costs its command, on files that exist in a listing alone.

    python -m benchmarks.tokenizer.many_files --files 1000000          memory and CPU seconds of the command, by phase
    python -m benchmarks.tokenizer.many_files --files 4096 --latency   seconds of 16 tasks and of one, 20 ms a request

The first command lists files of 50 TB in one folder, plans their partitions, and adds up the results of as many encode
tasks. Each phase runs in this process, so that the memory of the tasks counts, too. The second command opens and reads
every file as the stage does: 16 threads stand for 16 worker processes, because all they do is to wait.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast

import fsspec
from fsspec.spec import AbstractFileSystem

from benchmarks.machine import describe_machine
from benchmarks.tokenizer.row_measurement import peak_memory_bytes
from services.common.artifacts.corpus import SPLITS
from services.common.launch.launcher import Launcher
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import write_recipe
from services.tokenizer.corpus_inputs import list_corpus_inputs
from services.tokenizer.encode_task import EncodedPart, EncodedPartition, EncodedPartitions
from services.tokenizer.partition_plan import PlanFolder, plan_partitions
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.tasks import TaskSequence, map_largest_first

LINE = b'{"text": "a document of a million"}\n'
TEXT_BYTES = 50 * 10**12
REQUEST_SECONDS = 0.02
WORKERS = 16


class ListedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files of one folder, all with the same content, in a store that answers after `request_seconds`."""

    protocol = "listed"
    num_files = 0
    file_bytes = len(LINE)
    ending = "jsonl"
    request_seconds = 0.0

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._wait()
        infos = [self._describe(f"texts/part-{number:08d}.{self.ending}") for number in range(self.num_files)]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._wait()
        name = self._strip_protocol(path)
        return self._describe(name) if "/" in name else {"name": name, "size": 0, "type": "directory"}

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._wait()
        return io.BytesIO(LINE)

    def _describe(self, name: str) -> dict[str, Any]:
        """Describe a file as s3fs does."""
        return {
            "Key": name,
            "LastModified": "2026-01-01 00:00:00+00:00",
            "ETag": f'"{hash(name):032x}"',
            "Size": self.file_bytes,
            "StorageClass": "STANDARD",
            "type": "file",
            "size": self.file_bytes,
            "name": name,
        }

    def _wait(self) -> None:
        if self.request_seconds:
            time.sleep(self.request_seconds)


class ThreadLauncher:
    """Runs tasks in threads of this process."""

    def map_tasks(
        self, function: Callable[[Any], Any], items: Sequence[Any], num_workers: int
    ) -> Iterator[tuple[int, Any]]:
        if num_workers == 1:
            yield from ((index, function(item)) for index, item in enumerate(items))
            return
        with ThreadPoolExecutor(num_workers) as pool:
            running = {pool.submit(function, item): index for index, item in enumerate(items)}
            for future in as_completed(running):
                yield running[future], future.result()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenizer.many_files", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--files", type=int, required=True, help="number of files")
    parser.add_argument("--latency", action="store_true", help="wait 20 ms for every request to the store")
    arguments = parser.parse_args(argv)
    fsspec.register_implementation(ListedFileSystem.protocol, ListedFileSystem)
    ListedFileSystem.num_files = arguments.files
    print(f"machine   {describe_machine()}\nfiles     {arguments.files:,}")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        (measure_latency if arguments.latency else measure_memory)(Path(folder))
    return 0


def measure_memory(folder: Path) -> None:
    ListedFileSystem.ending, ListedFileSystem.file_bytes = "txt", TEXT_BYTES // ListedFileSystem.num_files
    recipe = _load_recipe(folder, num_workers=1, split_bytes=64 * 2**20, max_document_bytes=2**40)
    row = "{:<10}{:>12}{:>18}"
    print(row.format("phase", "CPU s", "peak memory, MB"))

    def report(phase: str, begin: float) -> None:
        print(row.format(phase, f"{time.process_time() - begin:.1f}", f"{peak_memory_bytes() / 1e6:,.0f}"), flush=True)

    report("start", time.process_time())
    begin = time.process_time()
    inputs = list_corpus_inputs(recipe)
    report("list", begin)
    begin = time.process_time()
    plan = plan_partitions(folder / "plan", recipe, inputs.listings, cast("Launcher", ThreadLauncher()))
    partitions = plan.read_partitions()
    report("plan", begin)
    begin = time.process_time()
    encoded = EncodedPartitions(partitions)
    tasks = TaskSequence(len(partitions), lambda index: index)
    for index, result in map_largest_first(
        cast("Launcher", ThreadLauncher()), _make_result, tasks, partitions["bytes"], num_workers=1
    ):
        encoded.add(index, result)
    report("encode", begin)
    print(f"{len(partitions):,} partitions, {encoded.totals('train').tokens:,} tokens")


def _make_result(index: int) -> EncodedPartition:
    """Return what an encode task returns, without its work."""
    part = EncodedPart(documents=1, text_bytes=1, tokens=index + 2, tokens_xxh3="0" * 32, starts_xxh3="0" * 32)
    return EncodedPartition(
        index=index,
        key="",
        encoder="",
        text_xxh3=f"{index:032x}",
        bad_files=(),
        files_without_text=(),
        max_document_bytes=2**40,
        parts=dict.fromkeys(SPLITS, part),
        counts={"documents_read": 1, "documents_duplicate": 0},
    )


def measure_latency(folder: Path) -> None:
    ListedFileSystem.request_seconds = REQUEST_SECONDS
    seconds = {}
    for num_workers in (1, WORKERS):
        begin = time.perf_counter()
        split_bytes = max(1, ListedFileSystem.num_files // 128) * len(LINE)
        recipe = _load_recipe(folder, num_workers, split_bytes, max_document_bytes=2**20)
        listings = list_corpus_inputs(recipe).listings
        launcher = cast("Launcher", ThreadLauncher())
        plan = plan_partitions(folder / f"plan-{num_workers}", recipe, listings, launcher)
        partitions = plan.read_partitions()
        tasks = TaskSequence(len(partitions), lambda index, path=plan.path: (path, index))  # type: ignore[misc]
        for _ in map_largest_first(launcher, _read_partition, tasks, partitions["bytes"], num_workers):
            pass
        seconds[num_workers] = time.perf_counter() - begin
        print(f"{num_workers:>2} tasks at a time   {seconds[num_workers]:,.1f} s", flush=True)
    print(f"ratio     {seconds[1] / seconds[WORKERS]:.1f}")


def _read_partition(task: tuple[Path, int]) -> int:
    partition = PlanFolder(task[0]).read_partition(task[1])
    return sum(map(len, read_documents(partition.file_ranges, "reject", 1_000)))


def _load_recipe(folder: Path, num_workers: int, split_bytes: int, max_document_bytes: int) -> Recipe:
    path = write_recipe(
        folder,
        corpus__sources=[{"uri": "listed://texts"}],
        corpus__split_bytes=split_bytes,
        corpus__max_document_bytes=max_document_bytes,
        tokenizer__num_workers=num_workers,
    )
    return load_recipe(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
