"""Rows that read samples in random order, as the trainer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.tokenizer.benchmark_folder import SEQUENCE_LENGTH, BenchmarkFolder
from benchmarks.tokenizer.row_measurement import RowMeasurement, Watch

SAMPLES = 20_000


def read_anchor(bench: BenchmarkFolder) -> RowMeasurement:
    """`load_from_disk` and transformers' default_data_collator, one sample a batch."""
    import datasets  # noqa: PLC0415
    from transformers import default_data_collator  # noqa: PLC0415

    rows = _rows_of_tokens()
    columns = {"input_ids": rows.astype(np.int32), "attention_mask": np.ones_like(rows, np.int8)}
    saved = datasets.Dataset.from_dict({**columns, "labels": rows.astype(np.int64)})
    saved.save_to_disk(str(bench.output))
    stored = datasets.load_from_disk(str(bench.output))
    return _read(lambda index: default_data_collator([stored[index]]), count=1_000)


def read_memmap(bench: BenchmarkFolder) -> RowMeasurement:
    """A memory-mapped flat file of uint16, copied to int64, as Megatron-LM reads."""
    import torch  # noqa: PLC0415

    bench.output.mkdir(exist_ok=True)
    path = bench.output / "tokens.bin"
    _rows_of_tokens().tofile(path)
    tokens = np.memmap(path, np.uint16, mode="r")

    def read(index: int) -> Any:
        begin = index * SEQUENCE_LENGTH
        return torch.from_numpy(tokens[begin : begin + SEQUENCE_LENGTH + 1].astype(np.int64))[None]

    return _read(read, count=SAMPLES)


def read_ours(bench: BenchmarkFolder) -> RowMeasurement:
    """`TokenStream` to a torch int64 tensor [1, 4097], one sample a batch."""
    return _read_ours(bench, 1)


def read_ours_eight(bench: BenchmarkFolder) -> RowMeasurement:
    """`TokenStream` to a torch int64 tensor [8, 4097], eight samples a batch."""
    return _read_ours(bench, 8)


def _read_ours(bench: BenchmarkFolder, batch_size: int) -> RowMeasurement:
    import torch  # noqa: PLC0415

    from services.common.artifacts.corpus import CorpusManifest  # noqa: PLC0415
    from services.common.artifacts.files import total_bytes, verify_files  # noqa: PLC0415
    from services.common.artifacts.store import open_artifact  # noqa: PLC0415
    from services.common.artifacts.token_stream import TokenStream  # noqa: PLC0415
    from services.tokenizer.command import main  # noqa: PLC0415

    main(["--recipe", str(bench.write_recipe(1)), "--root", str(bench.output), "--launch", "inline"])
    (folder,) = bench.output.glob("corpus/*/*/manifest.json")
    corpus = open_artifact(folder.parent, CorpusManifest)
    watch = Watch()
    verify_files(corpus.path, corpus.manifest)
    verified = watch.stop()
    stream = TokenStream(corpus.path, corpus.manifest.corpus, "train")
    order = np.random.default_rng(0).integers(0, stream.num_samples, SAMPLES)
    batches = order.reshape(-1, batch_size)
    measured = _read(lambda index: torch.from_numpy(stream.read(batches[index])), count=len(batches))
    measured.samples = SAMPLES
    gigabytes = total_bytes(corpus.manifest.files) / 1e9
    rate = gigabytes / verified.wall_seconds
    measured.notes.append(f"{gigabytes:.3f} GB verified at {rate:.1f} GB/s by all cores, from the page cache")
    return measured


def _read(read: Callable[[int], Any], count: int) -> RowMeasurement:
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
