"""What `benchmarks.tokenizer` measures: each row is a function that runs alone in a process of its own.

A row returns what it did and how long it took, after everything was imported and loaded: a program's start is no part
of any rate here.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

SEQUENCE_LENGTH = 4096
START_SECONDS = 120
SAMPLES = 20_000


@dataclass
class Measurement:
    wall_seconds: float
    cpu_seconds: float
    tokens: int = 0
    stored_bytes: int = 0
    """All files that the row leaves behind, caches too."""
    ids_digest: str = ""
    """Of every document's ids without BOS and EOS, when the row keeps documents apart."""
    samples: int = 0
    notes: list[str] = field(default_factory=list)
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class Workbench:
    """The folder that all rows read: text as parquet, a vocabulary in the forms that libraries want."""

    folder: Path

    @property
    def parquet(self) -> Path:
        return self.folder / "text.parquet"

    @property
    def model(self) -> Path:
        return self.folder / "tokenizer.model"

    @property
    def hugging_face(self) -> Path:
        """A folder for AutoTokenizer, with the tokenizer.json that encodes like the model."""
        return self.folder / "hugging-face"

    @property
    def output(self) -> Path:
        return self.folder / f"output-{os.getpid()}"

    def documents(self) -> list[bytes]:
        import pyarrow.parquet as pq  # noqa: PLC0415

        column = pq.read_table(self.parquet, columns=["text"])["text"]
        return [document.encode() for document in column.to_pylist()]


class Watch:
    """Wall and CPU time of this process and of the ones that it started and that have ended."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def stop(self) -> Measurement:
        return Measurement(time.perf_counter() - self._wall, _cpu_seconds() - self._cpu)


def anchor(bench: Workbench) -> Measurement:
    """`datasets.map` with the fast Llama tokenizer, `group_texts`, `save_to_disk`: transformers' run_clm example."""
    import datasets  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(bench.hugging_face), use_fast=True)

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
    text = datasets.load_dataset("parquet", data_files=str(bench.parquet), split="train", cache_dir=str(cache))
    read_bytes = _bytes_below(cache)
    tokenized = text.map(tokenize, batched=True, remove_columns=["text"])
    grouped = tokenized.map(group_texts, batched=True)
    grouped.save_to_disk(str(saved))
    measured = watch.stop()
    measured.tokens = len(grouped) * SEQUENCE_LENGTH
    measured.stored_bytes = _bytes_below(bench.output) - read_bytes
    encoded = sum(map(len, tokenized["input_ids"]))
    measured.notes.append(f"{encoded - measured.tokens:,} of {encoded:,} tokens lost")
    measured.notes.append(f"{_bytes_below(saved) / measured.tokens:.2f} B/token saved, the rest is cache")
    return measured


def tokenizers_batch(bench: Workbench) -> Measurement:
    """Hugging Face `tokenizers`, encode_batch_fast."""
    import tokenizers  # noqa: PLC0415

    tokenizer = tokenizers.Tokenizer.from_file(str(bench.hugging_face / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    texts = [document.decode() for document in bench.documents()]
    watch = Watch()
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return _with_ids(watch.stop(), bench, ids)


def sentencepiece_batch(bench: Workbench) -> Measurement:
    """SentencePiece itself, to numpy arrays: the reference."""
    from sentencepiece import SentencePieceProcessor  # noqa: PLC0415

    processor = SentencePieceProcessor(model_file=str(bench.model))
    documents = bench.documents()
    watch = Watch()
    ids = processor.encode(documents, out_type="numpy", num_threads=1)
    return _with_ids(watch.stop(), bench, ids)


def fastokens_batch(bench: Workbench) -> Measurement:
    """fastokens, encode_batch_flat: the fastest exact library that we know."""
    import fastokens  # noqa: PLC0415

    tokenizer = fastokens.Tokenizer.from_file(str(bench.hugging_face / "tokenizer.json"))
    texts = [document.decode() for document in bench.documents()]
    watch = Watch()
    flat, ends = tokenizer.encode_batch_flat(texts, split_special_tokens=True)
    measured = watch.stop()
    ids = np.split(np.frombuffer(flat, np.uint32), np.frombuffer(ends, np.uint64)[1:-1].astype(np.int64))
    return _with_ids(measured, bench, ids)


def kernel_cold(bench: Workbench) -> Measurement:
    """The chunk kernel with an empty table."""
    return _kernel(bench, passes=1)


def kernel_warm(bench: Workbench) -> Measurement:
    """The chunk kernel on text that it has seen."""
    return _kernel(bench, passes=2)


def _kernel(bench: Workbench, passes: int) -> Measurement:
    from services.tokenizer.encoding.chunk_encoder import ChunkEncoder, compile_kernels  # noqa: PLC0415
    from services.tokenizer.text_batch import in_batches  # noqa: PLC0415

    compile_kernels(np.dtype(np.uint16))
    encoder = ChunkEncoder.from_model(bench.model.read_bytes())
    batches = list(in_batches(bench.documents()))
    for _ in range(passes):
        watch = Watch()
        encoded = [encoder.encode(batch) for batch in batches]
        measured = watch.stop()
    # As the others': without BOS and EOS.
    ids = [each[begin + 1 : end - 1] for each, offsets in encoded for begin, end in _pairs(offsets)]
    return _with_ids(measured, bench, ids)


def stage_alone(bench: Workbench) -> Measurement:
    """The whole stage, from parquet to fsynced and verified shards, self-check included, one process."""
    return _stage(bench, num_workers=1)


def stage_two(bench: Workbench) -> Measurement:
    """The whole stage on two processes."""
    return _stage(bench, num_workers=2)


def encode_alone(bench: Workbench) -> Measurement:
    """The stage's encode tasks over all splits by one process that has started."""
    return _encode_tasks(bench, num_processes=1)


def encode_two(bench: Workbench) -> Measurement:
    """The stage's encode tasks over all splits by two processes that have started."""
    return _encode_tasks(bench, num_processes=2)


def kernel_alone(bench: Workbench) -> Measurement:
    """The kernel in a process of its own, over all of the text, from an empty table."""
    return _kernel_processes(bench, num_processes=1)


def kernel_two(bench: Workbench) -> Measurement:
    """The kernel in two processes at once, each over all of the text, from an empty table."""
    return _kernel_processes(bench, num_processes=2)


def _kernel_processes(bench: Workbench, num_processes: int) -> Measurement:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes + 1)
    processes = [context.Process(target=_encode_text, args=(bench, barrier)) for _ in range(num_processes)]
    measured = _time_processes(processes, barrier)
    measured.notes.append(f"{num_processes} x the text")
    measured.wall_seconds /= num_processes  # for one text
    return measured


def _encode_text(bench: Workbench, barrier: Any) -> None:
    from services.tokenizer.encoding.chunk_encoder import ChunkEncoder  # noqa: PLC0415
    from services.tokenizer.text_batch import TextBatch, in_batches  # noqa: PLC0415

    batches = list(in_batches(bench.documents()))
    ChunkEncoder.from_model(bench.model.read_bytes()).encode(TextBatch.of([b"compile"]))
    encoder = ChunkEncoder.from_model(bench.model.read_bytes())
    barrier.wait(START_SECONDS)
    for batch in batches:
        encoder.encode(batch)


def _time_processes(processes: Sequence[Any], barrier: Any) -> Measurement:
    """From the moment when all of them are ready to the moment when all have ended."""
    for process in processes:
        process.start()
    barrier.wait(START_SECONDS)
    watch = Watch()
    for process in processes:
        process.join()
    measured = watch.stop()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a process failed: {[process.exitcode for process in processes]}")
    measured.cpu_seconds = measured.wall_seconds * len(processes)  # each works all the time, or waits for a core
    return measured


def _stage(bench: Workbench, num_workers: int) -> Measurement:
    from services.common.artifacts.corpus import CorpusManifest  # noqa: PLC0415
    from services.common.artifacts.store import open_artifact  # noqa: PLC0415
    from services.tokenizer.command import main  # noqa: PLC0415
    from services.tokenizer.encoding.chunk_encoder import compile_kernels  # noqa: PLC0415

    compile_kernels(np.dtype(np.uint16))
    recipe = write_recipe(bench, num_workers)
    watch = Watch()
    exit_code = main(["--recipe", str(recipe), "--root", str(bench.output), "--launch", "inline"])
    measured = watch.stop()
    (folder,) = bench.output.glob("corpus/*/*/manifest.json")
    payload = open_artifact(folder.parent, CorpusManifest).manifest.corpus
    measured.tokens = sum(counts.tokens for counts in payload.splits.values())
    measured.stored_bytes = _bytes_below(folder.parent) - bench.model.stat().st_size
    measured.notes.append(", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in payload.phases))
    measured.notes.append(f"{payload.documents_checked:,} documents checked, exit code {exit_code}")
    return measured


def _encode_tasks(bench: Workbench, num_processes: int) -> Measurement:
    from services.common.recipe import load_recipe  # noqa: PLC0415
    from services.tokenizer.build import make_tasks  # noqa: PLC0415
    from services.tokenizer.plan import make_plan  # noqa: PLC0415
    from services.tokenizer.vocabulary import provide_vocabulary  # noqa: PLC0415

    recipe = load_recipe(write_recipe(bench, num_processes))
    plan = make_plan(recipe)
    bench.output.mkdir(exist_ok=True)
    tasks = make_tasks(recipe, plan, *provide_vocabulary(recipe, plan, bench.output), bench.output)
    context = multiprocessing.get_context("spawn")
    shares = [tasks[number::num_processes] for number in range(num_processes)]
    barrier = context.Barrier(num_processes + 1)
    processes = [context.Process(target=_encode_share, args=(share, barrier)) for share in shares]
    measured = _time_processes(processes, barrier)
    measured.notes.append(f"{len(tasks)} splits; after start and self-check; CPU is processes x wall")
    return measured


def _encode_share(tasks: Any, barrier: Any) -> None:
    from services.tokenizer.encode_task import encode_split  # noqa: PLC0415
    from services.tokenizer.encoding.self_check import SAMPLED_DOCUMENTS  # noqa: PLC0415
    from services.tokenizer.encoding.vocabulary_file import load_encoder  # noqa: PLC0415
    from services.tokenizer.text_batch import TextBatch  # noqa: PLC0415

    encoder = load_encoder(tasks[0].vocabulary_path, tasks[0].vocabulary, tasks[0].encoder)
    encoder.encode(TextBatch.of([b"x"] * SAMPLED_DOCUMENTS))  # instead of the sample that the self-check would take
    barrier.wait()
    for task in tasks:
        encode_split(task)


def read_anchor(bench: Workbench) -> Measurement:
    """`load_from_disk` and transformers' default_data_collator, one sample a batch."""
    import datasets  # noqa: PLC0415
    from transformers import default_data_collator  # noqa: PLC0415

    rows = _rows_of_tokens()
    columns = {"input_ids": rows.astype(np.int32), "attention_mask": np.ones_like(rows, np.int8)}
    saved = datasets.Dataset.from_dict({**columns, "labels": rows.astype(np.int64)})
    saved.save_to_disk(str(bench.output))
    stored = datasets.load_from_disk(str(bench.output))
    return _read(lambda index: default_data_collator([stored[index]]), count=1_000)


def read_memmap(bench: Workbench) -> Measurement:
    """As Megatron-LM reads: a flat file of uint16, mapped, widened by a copy."""
    import torch  # noqa: PLC0415

    bench.output.mkdir(exist_ok=True)
    path = bench.output / "tokens.bin"
    _rows_of_tokens().tofile(path)
    tokens = np.memmap(path, np.uint16, mode="r")

    def read(index: int) -> Any:
        begin = index * SEQUENCE_LENGTH
        return torch.from_numpy(tokens[begin : begin + SEQUENCE_LENGTH + 1].astype(np.int64))[None]

    return _read(read, count=SAMPLES)


def read_ours(bench: Workbench) -> Measurement:
    """TokenStream, one sample a batch, to a torch int64 tensor [1, 4097]."""
    return _read_ours(bench, 1)


def read_ours_eight(bench: Workbench) -> Measurement:
    """TokenStream, eight samples a batch."""
    return _read_ours(bench, 8)


def _read_ours(bench: Workbench, batch_size: int) -> Measurement:
    import torch  # noqa: PLC0415

    from services.common.artifacts.corpus import CorpusManifest  # noqa: PLC0415
    from services.common.artifacts.store import open_artifact  # noqa: PLC0415
    from services.common.artifacts.token_stream import TokenStream  # noqa: PLC0415
    from services.tokenizer.command import main  # noqa: PLC0415

    main(["--recipe", str(write_recipe(bench, 1)), "--root", str(bench.output), "--launch", "inline"])
    (folder,) = bench.output.glob("corpus/*/*/manifest.json")
    stream = TokenStream.open(open_artifact(folder.parent, CorpusManifest), "train")
    order = np.random.default_rng(0).integers(0, stream.num_samples, SAMPLES)
    batches = order.reshape(-1, batch_size)
    measured = _read(lambda index: torch.from_numpy(stream.read(batches[index])), count=len(batches))
    measured.samples = SAMPLES
    return measured


def _read(read: Callable[[int], Any], count: int) -> Measurement:
    order = np.random.default_rng(0).permutation(count).tolist()
    for index in order[:200]:
        read(index)
    watch = Watch()
    for index in order:
        read(index)
    measured = watch.stop()
    measured.samples = count
    return measured


def _rows_of_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 32_000, (SAMPLES + 1, SEQUENCE_LENGTH), dtype=np.uint16)


def write_recipe(bench: Workbench, num_workers: int) -> Path:
    """A recipe for the stage; its trainer's sections are never read."""
    path = bench.folder / f"recipe-{os.getpid()}.toml"
    path.write_text(
        f"""
name = "benchmark"
[corpus]
name = "benchmark"
sequence_length = {SEQUENCE_LENGTH}
validation_fraction = 0.0
split_bytes = 4194304
sources = [{{ uri = {json.dumps(str(bench.parquet))} }}]
[tokenizer]
model = {json.dumps(str(bench.model))}
num_workers = {num_workers}
[model]
preset = "llama2-7b"
[batch]
micro_batch_size = 1
global_batch_size = 1
[optimizer]
learning_rate = 1e-4
min_learning_rate = 1e-5
warmup_steps = 1
decay_steps = 2
[train]
max_steps = 2
""",
        encoding="utf-8",
    )
    return path


def _with_ids(measured: Measurement, bench: Workbench, ids: Any) -> Measurement:
    """Count and hash ids; a document whose ids are not SentencePiece's changes the hash."""
    digest = hashlib.sha256()
    for each in ids:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(np.asarray(each, np.uint32).tobytes())
        measured.tokens += len(each)
    measured.ids_digest = digest.hexdigest()
    return measured


def _pairs(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _cpu_seconds() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def _peak_memory_bytes() -> int:
    """Of this process. Not `ru_maxrss`: a new program begins with its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def run_row(name: str, folder: Path, result: Path) -> None:
    """Run a row and write its measurement; what it stored is removed."""
    bench = Workbench(folder)
    try:
        measured: Measurement = globals()[name](bench)
    finally:
        shutil.rmtree(bench.output, ignore_errors=True)
    measured.peak_memory_bytes = _peak_memory_bytes()
    result.write_text(json.dumps(asdict(measured)), encoding="utf-8")
