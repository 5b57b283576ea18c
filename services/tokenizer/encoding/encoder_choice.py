"""Chooses a vocabulary's encoder: a fast one where its ids are the reference library's, else that library."""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache
from pathlib import Path
from typing import Literal

from services.common.artifacts.corpus import Vocabulary
from services.common.vocabularies.fuzz import fuzz_of_vocabulary
from services.tokenizer.encoding.chunk_tables import obstacle_to_chunks
from services.tokenizer.encoding.encoder import FUZZ_DOCUMENTS, CheckedEncoder, Encoder

EncoderChoice = Literal["auto", "reference"]


@lru_cache(maxsize=1)
def load_encoder(path: Path, vocabulary: Vocabulary, choice: EncoderChoice, sampled_bytes: int) -> CheckedEncoder:
    """Load a vocabulary's encoder, once a process. The reference library encodes its first `sampled_bytes` too.

    Raises `DeviceError`, with the document and both lists of ids, when the two encode a document differently.
    """
    content = path.read_bytes()
    reference = _reference(content, vocabulary)
    fast = _try_fast(content, vocabulary) if choice == "auto" else None
    encoder = reference if fast is None or isinstance(fast, str) else fast
    fuzz = fuzz_of_vocabulary(content, vocabulary, FUZZ_DOCUMENTS)
    return CheckedEncoder(encoder, reference, fuzz, sampled_bytes)


def explain_choice(content: bytes, vocabulary: Vocabulary, choice: EncoderChoice) -> str:
    """Return a line for the log that names the encoder which `load_encoder` takes, and the reason."""
    if choice == "reference":
        return 'the reference library encodes, because tokenizer.encoder = "reference"'
    if vocabulary.kind == "sentencepiece":  # `_try_fast` would import numba, which this process does not need
        obstacle, fast_name = obstacle_to_chunks(content), "chunk kernel"
    else:
        fast = _try_fast(content, vocabulary)
        obstacle, fast_name = (fast, "") if isinstance(fast, str) else (None, fast.name)
    return f"{reference_name(vocabulary)} itself encodes, because {obstacle}" if obstacle else f"{fast_name} encodes"


def reference_name(vocabulary: Vocabulary) -> str:
    """Return name and version of the library that defines the vocabulary's ids."""
    package = "tokenizers" if vocabulary.kind == "tokenizer_json" else vocabulary.kind
    return f"{package} {importlib.metadata.version(package)}"


@lru_cache(maxsize=1)
def _try_fast(content: bytes, vocabulary: Vocabulary) -> Encoder | str:
    """Return the vocabulary's fast encoder, or the reason why it has none, as the end of a sentence with "because".

    Only the libraries of the vocabulary's kind are imported.
    """
    if vocabulary.kind == "sentencepiece":
        if obstacle := obstacle_to_chunks(content):
            return obstacle
        from services.tokenizer.encoding.chunk_encoder import ChunkEncoder  # noqa: PLC0415

        return ChunkEncoder.from_model(content)
    from services.tokenizer.encoding.byte_level import FastokensEncoder, obstacle_to_fastokens  # noqa: PLC0415

    make = FastokensEncoder.from_json if vocabulary.kind == "tokenizer_json" else FastokensEncoder.from_tiktoken
    try:
        encoder = make(content, vocabulary.bos_id, vocabulary.eos_id, vocabulary.vocab_size)
    except ValueError as error:
        return f"fastokens cannot read the vocabulary ({error})"
    obstacle = obstacle_to_fastokens(content) if vocabulary.kind == "tokenizer_json" else None
    return obstacle or encoder


def _reference(content: bytes, vocabulary: Vocabulary) -> Encoder:
    bos_id, eos_id, vocab_size = vocabulary.bos_id, vocabulary.eos_id, vocabulary.vocab_size
    match vocabulary.kind:
        case "sentencepiece":
            from services.tokenizer.encoding.reference import SentencePieceEncoder  # noqa: PLC0415

            return SentencePieceEncoder(content)
        case "tokenizer_json":
            from services.tokenizer.encoding.reference import TokenizersEncoder  # noqa: PLC0415

            return TokenizersEncoder(content, bos_id, eos_id, vocab_size)
        case "tiktoken":
            from services.tokenizer.encoding.byte_level import TiktokenEncoder  # noqa: PLC0415

            return TiktokenEncoder(content, bos_id, eos_id, vocab_size)
