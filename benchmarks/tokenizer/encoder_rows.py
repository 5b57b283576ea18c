"""Rows that encode text to ids in memory, in one process."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from benchmarks.tokenizer.benchmark_folder import BenchmarkFolder
from benchmarks.tokenizer.row_measurement import RowMeasurement, Watch


def tokenizers_batch(bench: BenchmarkFolder) -> RowMeasurement:
    """Hugging Face `tokenizers`, encode_batch_fast."""
    import tokenizers  # noqa: PLC0415

    tokenizer = tokenizers.Tokenizer.from_file(str(bench.hugging_face / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    texts = [document.decode() for document in bench.documents()]
    watch = Watch()
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return watch.stop().add_ids(ids)


def sentencepiece_batch(bench: BenchmarkFolder) -> RowMeasurement:
    """SentencePiece, which defines the ids, to numpy arrays."""
    from sentencepiece import SentencePieceProcessor  # noqa: PLC0415

    processor = SentencePieceProcessor(model_file=str(bench.model))
    documents = bench.documents()
    watch = Watch()
    ids = processor.encode(documents, out_type="numpy", num_threads=1)
    return watch.stop().add_ids(ids)


def fastokens_batch(bench: BenchmarkFolder) -> RowMeasurement:
    """fastokens, encode_batch_flat: the fastest exact library that was found."""
    import fastokens  # noqa: PLC0415

    tokenizer = fastokens.Tokenizer.from_file(str(bench.hugging_face / "tokenizer.json"))
    texts = [document.decode() for document in bench.documents()]
    watch = Watch()
    flat, ends = tokenizer.encode_batch_flat(texts, split_special_tokens=True)
    measured = watch.stop()
    ids = np.split(np.frombuffer(flat, np.uint32), np.frombuffer(ends, np.uint64)[1:-1].astype(np.int64))
    return measured.add_ids(ids)


def kernel_cold(bench: BenchmarkFolder) -> RowMeasurement:
    """The chunk kernel with an empty table."""
    return _kernel(bench, passes=1)


def kernel_warm(bench: BenchmarkFolder) -> RowMeasurement:
    """The chunk kernel on text that it has encoded before."""
    return _kernel(bench, passes=2)


def _kernel(bench: BenchmarkFolder, passes: int) -> RowMeasurement:
    from services.tokenizer.encoding.chunk_encoder import ChunkEncoder, load_kernels  # noqa: PLC0415
    from services.tokenizer.text_batch import in_batches  # noqa: PLC0415

    load_kernels("uint16")
    encoder = ChunkEncoder.from_model(bench.model.read_bytes())
    batches = list(in_batches(bench.documents()))
    for _ in range(passes):
        watch = Watch()
        encoded = [encoder.encode(batch) for batch in batches]
        measured = watch.stop()
    # The other rows give ids without BOS and EOS.
    ids = [each[begin + 1 : end - 1] for each, offsets in encoded for begin, end in pairwise(offsets.tolist())]
    return measured.add_ids(ids)
