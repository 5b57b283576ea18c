"""Rows that turn files of text into files of tokens, and rows that compare two processes with one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

from benchmarks.tokenizer.benchmark_folder import SEQUENCE_LENGTH, BenchmarkFolder
from benchmarks.tokenizer.row_measurement import RowMeasurement, Watch, bytes_below

START_SECONDS = 120

Prepare = Callable[..., Callable[[], None]]


def anchor(bench: BenchmarkFolder) -> RowMeasurement:
    """`datasets.map` with the fast Llama tokenizer, `group_texts`, `save_to_disk`: transformers' run_clm example."""
    import datasets  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(bench.hugging_face), use_fast=True)  # nosec B615 # local

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"])

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain(*batch[key])) for key in batch}
        total = len(joined["input_ids"]) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
        blocks = {
            key: [ids[begin : begin + SEQUENCE_LENGTH] for begin in range(0, total, SEQUENCE_LENGTH)]
            for key, ids in joined.items()
        }
        return {**blocks, "labels": [list(ids) for ids in blocks["input_ids"]]}

    cache, saved = bench.output / "cache", bench.output / "saved"
    watch = Watch()
    files = str(bench.parquet)
    text = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))  # nosec B615 # local
    read_bytes = bytes_below(cache)
    tokenized = text.map(tokenize, batched=True, remove_columns=["text"])
    grouped = tokenized.map(group_texts, batched=True)
    grouped.save_to_disk(str(saved))
    measured = watch.stop()
    measured.tokens = len(grouped) * SEQUENCE_LENGTH
    measured.stored_bytes = bytes_below(bench.output) - read_bytes
    encoded = sum(map(len, tokenized["input_ids"]))
    measured.notes.append(f"{encoded - measured.tokens:,} of {encoded:,} tokens lost")
    measured.notes.append(f"{bytes_below(saved) / measured.tokens:.2f} B/token saved, the rest is cache")
    return measured


def stage_1(bench: BenchmarkFolder) -> RowMeasurement:
    """The whole stage in one process: from Parquet to synced and verified shards, with the self-check."""
    return _stage(bench, num_workers=1)


def stage_2(bench: BenchmarkFolder) -> RowMeasurement:
    """The whole stage in two processes, with their start."""
    measured = _stage(bench, num_workers=2)
    measured.cpu_seconds = None
    return measured


def duplicates_1(bench: BenchmarkFolder) -> RowMeasurement:
    """The whole stage in one process with `corpus.duplicates = "drop"`, to be compared with `stage_1`."""
    return _stage(bench, 1, "--corpus.duplicates=drop")


def encode_1(bench: BenchmarkFolder) -> RowMeasurement:
    """The stage's encode tasks in one process, without its start and its self-check."""
    return _encode_tasks(bench, num_processes=1)


def encode_2(bench: BenchmarkFolder) -> RowMeasurement:
    """The stage's encode tasks in two processes, without their start and their self-checks."""
    return _encode_tasks(bench, num_processes=2)


def overlap_1(bench: BenchmarkFolder) -> RowMeasurement:
    """The count of the validation split's n-grams that are in train, one process, beside the encode tasks before it."""
    from services.common.artifacts.corpus import SPLITS  # noqa: PLC0415
    from services.common.launch import inline  # noqa: PLC0415
    from services.common.recipe.file import load_recipe  # noqa: PLC0415
    from services.tokenizer.encode_task import EncodedPartitions, encode_partition  # noqa: PLC0415
    from services.tokenizer.ngram_overlap import count_overlap  # noqa: PLC0415

    recipe = load_recipe(bench.write_recipe(1), {"corpus.validation_fraction": 0.01})
    tasks, partitions = _plan_tasks(bench, recipe)
    watch = Watch()
    encoded = EncodedPartitions(partitions)
    for index, task in enumerate(tasks):
        encoded.add(index, encode_partition(task)[0])
    encoding = watch.stop()
    watch = Watch()
    overlap = count_overlap(bench.output, tasks[0].vocabulary, encoded, inline, num_workers=1)
    measured = watch.stop()
    measured.tokens = sum(encoded.totals(split).tokens for split in SPLITS)
    ngrams, in_train = sum(each.ngrams for each in overlap), sum(each.ngrams_in_train for each in overlap)
    measured.notes.append(
        f"{measured.cpu_seconds:.2f} s beside {encoding.cpu_seconds:.2f} s of the encode tasks with their self-check"
    )
    measured.notes.append(f"{measured.tokens:,} tokens, {in_train:,} of {ngrams:,} n-grams in train")
    return measured


def cold_1(bench: BenchmarkFolder) -> RowMeasurement:
    """The kernel with an empty table, one process over the whole text."""
    return _kernel_processes(bench, num_processes=1, is_warm=False)


def cold_2(bench: BenchmarkFolder) -> RowMeasurement:
    """The kernel with empty tables, two processes, both over the whole text."""
    return _kernel_processes(bench, num_processes=2, is_warm=False)


def warm_1(bench: BenchmarkFolder) -> RowMeasurement:
    """The kernel on text that it has encoded before, one process over the whole text."""
    return _kernel_processes(bench, num_processes=1, is_warm=True)


def warm_2(bench: BenchmarkFolder) -> RowMeasurement:
    """The kernel on text that it has encoded before, two processes, both over the whole text."""
    return _kernel_processes(bench, num_processes=2, is_warm=True)


def _stage(bench: BenchmarkFolder, num_workers: int, *overrides: str) -> RowMeasurement:
    from services.common.artifacts.corpus import CorpusManifest  # noqa: PLC0415
    from services.common.artifacts.store import open_artifact  # noqa: PLC0415
    from services.common.process.entry_point import importing  # noqa: PLC0415
    from services.tokenizer.encoding.chunk_encoder import load_kernels  # noqa: PLC0415

    with importing():  # as the program does
        from services.tokenizer.command import main  # noqa: PLC0415

    load_kernels("uint16")
    recipe = bench.write_recipe(num_workers)
    watch = Watch()
    exit_code = main(["--recipe", str(recipe), "--root", str(bench.output), "--launch", "inline", *overrides])
    measured = watch.stop()
    (folder,) = bench.output.glob("corpus/*/*/manifest.json")
    payload = open_artifact(folder.parent, CorpusManifest).manifest.corpus
    measured.tokens = sum(counts.tokens for counts in payload.splits.values())
    measured.stored_bytes = bytes_below(folder.parent) - bench.model.stat().st_size
    measured.notes.append(", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in payload.phases))
    if payload.documents_duplicate:
        measured.notes.append(f"{payload.documents_duplicate:,} of {payload.documents_read:,} documents are duplicates")
    measured.notes.append(f"{payload.documents_checked:,} documents checked, exit code {exit_code}")
    return measured


def _plan_tasks(bench: BenchmarkFolder, recipe: Any) -> tuple[Any, Any]:
    """Write the plan and the vocabulary into the output folder; return the encode tasks and the plan's partitions."""
    from services.common.launch import inline  # noqa: PLC0415
    from services.tokenizer.build import make_tasks  # noqa: PLC0415
    from services.tokenizer.corpus_inputs import list_corpus_inputs  # noqa: PLC0415
    from services.tokenizer.partition_plan import plan_partitions  # noqa: PLC0415
    from services.tokenizer.vocabulary.provision import provide_vocabulary  # noqa: PLC0415

    bench.output.mkdir(exist_ok=True)
    inputs = list_corpus_inputs(recipe)
    plan = plan_partitions(bench.output / "plan", recipe, inputs.listings, inline)
    vocabulary = provide_vocabulary(recipe, inputs, bench.output)
    return make_tasks(recipe, plan, *vocabulary, bench.output), plan.read_partitions()


def _encode_tasks(bench: BenchmarkFolder, num_processes: int) -> RowMeasurement:
    """Encode partitions in processes. A process that is done takes the next partition, as with the launchers."""
    from services.common.recipe.file import load_recipe  # noqa: PLC0415

    recipe = load_recipe(bench.write_recipe(num_processes))
    tasks = list(_plan_tasks(bench, recipe)[0])
    num_taken = _CONTEXT.Value("q", 0)
    measured = _time_processes(_prepare_encoding_partitions, (tasks, num_taken), num_processes)
    measured.notes.append(f"{len(tasks)} partitions")
    return measured


def _prepare_encoding_partitions(tasks: Any, num_taken: Any) -> Callable[[], None]:
    from services.tokenizer.encode_task import encode_partition  # noqa: PLC0415
    from services.tokenizer.encoding.encoder import SAMPLED_DOCUMENTS  # noqa: PLC0415
    from services.tokenizer.encoding.encoder_choice import load_encoder  # noqa: PLC0415
    from services.tokenizer.text_batch import TextBatch  # noqa: PLC0415

    encoder = load_encoder(tasks[0].vocabulary_path, tasks[0].vocabulary, tasks[0].recipe.tokenizer)
    encoder.encode(TextBatch.of([b"x"] * SAMPLED_DOCUMENTS))  # uses up the sample of the self-check

    def encode_partitions() -> None:
        while True:
            with num_taken.get_lock():
                index = num_taken.value
                num_taken.value += 1
            if index >= len(tasks):
                return
            encode_partition(tasks[index])

    return encode_partitions


def _kernel_processes(bench: BenchmarkFolder, num_processes: int, *, is_warm: bool) -> RowMeasurement:
    measured = _time_processes(_prepare_encoding_text, (bench, is_warm), num_processes)
    measured.texts = num_processes
    return measured


def _prepare_encoding_text(bench: BenchmarkFolder, is_warm: bool) -> Callable[[], None]:
    from services.tokenizer.encoding.chunk_encoder import ChunkEncoder, load_kernels  # noqa: PLC0415
    from services.tokenizer.text_batch import in_batches  # noqa: PLC0415

    load_kernels("uint16")
    batches = list(in_batches(bench.documents()))
    encoder = ChunkEncoder.from_model(bench.model.read_bytes())

    def encode_text() -> None:
        for batch in batches:
            encoder.encode(batch)

    if is_warm:
        encode_text()
    return encode_text


_CONTEXT = multiprocessing.get_context("spawn")


def _time_processes(prepare: Prepare, arguments: tuple[Any, ...], num_processes: int) -> RowMeasurement:
    """Measure the wall time from the first begin to the last end. Processes on Linux share one monotonic clock.

    `prepare(*arguments)` returns the work, and all processes begin it when all are prepared.
    """
    barrier, times = _CONTEXT.Barrier(num_processes), _CONTEXT.SimpleQueue()
    processes = [
        _CONTEXT.Process(target=_time_work, args=(prepare, arguments, barrier, times)) for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"processes ended with {[process.exitcode for process in processes]}")
    begins, ends = zip(*(times.get() for _ in processes), strict=True)
    return RowMeasurement(max(ends) - min(begins), cpu_seconds=None)


def _time_work(
    prepare: Callable[..., Callable[[], None]], arguments: tuple[Any, ...], barrier: Any, times: Any
) -> None:
    work = prepare(*arguments)
    barrier.wait(START_SECONDS)
    begin = time.perf_counter()
    work()
    times.put((begin, time.perf_counter()))
