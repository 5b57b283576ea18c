"""Chooses a vocabulary's encoder: a fast one where its ids are the reference library's, else that library."""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache
from pathlib import Path

from services.common.artifacts.corpus import Vocabulary
from services.common.recipe.schema import Tokenizer
from services.common.vocabularies.codec import load_codec
from services.common.vocabularies.fuzz import fuzz_of_vocabulary
from services.common.vocabularies.hugging_face import load_folder, read_backend
from services.tokenizer.encoding.chunk_tables import obstacle_to_chunks
from services.tokenizer.encoding.encoder import (
    FUZZ_DOCUMENTS,
    MIN_SAMPLED_BYTES,
    SAMPLED_BYTES,
    CheckedEncoder,
    Encoder,
    Offsets,
    TokenIds,
    find_difference,
    join_documents,
)
from services.tokenizer.text_batch import TextBatch


@lru_cache(maxsize=1)
def load_encoder(path: Path, vocabulary: Vocabulary, settings: Tokenizer) -> CheckedEncoder:
    """Load a vocabulary's encoder, once a process. The reference library encodes some of its first documents too.

    Raises `DeviceError`, with the document and both lists of ids, when the two encode a document differently.
    """
    reference = ReferenceEncoder(path, vocabulary)
    fast = _try_fast(path, vocabulary) if settings.encoder == "auto" else ""
    encoder: Encoder = reference if isinstance(fast, str) else fast
    is_compared = vocabulary.kind == "hugging_face"  # by `_try_fast`
    fuzz = [] if is_compared else fuzz_of_vocabulary(path, vocabulary, FUZZ_DOCUMENTS)
    return CheckedEncoder(encoder, reference, fuzz, max(MIN_SAMPLED_BYTES, SAMPLED_BYTES // settings.num_workers))


def describe_choice(path: Path, vocabulary: Vocabulary, choice: str) -> str:
    """Return a line for the log that names the encoder which `load_encoder` takes, and the reason."""
    if choice == "reference":
        return 'the reference library encodes, because tokenizer.encoder = "reference"'
    if vocabulary.kind == "sentencepiece":  # `_try_fast` would import numba, which this process does not need
        obstacle, fast_name = obstacle_to_chunks(path.read_bytes()), "chunk kernel"
    else:
        fast = _try_fast(path, vocabulary)
        obstacle, fast_name = (fast, "") if isinstance(fast, str) else (None, fast.name)
    return f"{reference_name(vocabulary)} itself encodes, because {obstacle}" if obstacle else f"{fast_name} encodes"


@lru_cache(maxsize=1)
def _try_fast(path: Path, vocabulary: Vocabulary) -> Encoder | str:
    """Return the vocabulary's fast encoder, or the reason why it has none, as the end of a sentence with "because"."""
    content: bytes | None = path.read_bytes()
    if vocabulary.kind == "hugging_face":
        content = read_backend(load_folder(path.parent))
    if content is None:
        return "it is written in Python"
    if vocabulary.kind == "sentencepiece":
        if obstacle := obstacle_to_chunks(content):
            return obstacle
        from services.tokenizer.encoding.chunk_encoder import ChunkEncoder  # noqa: PLC0415

        return ChunkEncoder.from_model(content)
    from services.tokenizer.encoding.byte_level import load_byte_level  # noqa: PLC0415

    encoder = load_byte_level(content, vocabulary)
    if isinstance(encoder, str) or vocabulary.kind != "hugging_face":
        return encoder
    fuzz = TextBatch.of(fuzz_of_vocabulary(path, vocabulary, FUZZ_DOCUMENTS))
    different = find_difference(encoder, ReferenceEncoder(path, vocabulary), fuzz)
    return encoder if different is None else f"{encoder.name} gives other ids for {different.decode()[:40]!r}"


class ReferenceEncoder:
    """The reference for vocabularies of all kinds."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._encode, self.vocabulary = load_codec(path, vocabulary).encode_documents, vocabulary
        self.name = reference_name(vocabulary)

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        return join_documents(self._encode(batch.documents()), self.vocabulary)


def reference_name(vocabulary: Vocabulary) -> str:
    """Return name and version of the library that defines the vocabulary's ids."""
    names = {"tokenizer_json": "tokenizers", "hugging_face": "transformers"}
    package = names.get(vocabulary.kind, vocabulary.kind)
    return f"{package} {importlib.metadata.version(package)}"
