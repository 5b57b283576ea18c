"""Which encoder a vocabulary gets: the fast one of its kind where its ids are the library's, or the library."""

from __future__ import annotations

import importlib.metadata
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from services.common.artifacts.corpus import Vocabulary
from services.common.input_file import read_file
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.encoding.chunk_tables import obstacle_to_chunks
from services.tokenizer.encoding.encoder import Encoder
from services.tokenizer.encoding.self_check import CheckedEncoder

EncoderChoice = Literal["auto", "reference"]


@lru_cache(maxsize=1)
def load_encoder(path: Path, vocabulary: Vocabulary, choice: EncoderChoice) -> CheckedEncoder:
    """The encoder of a vocabulary, checked against its reference; loaded once per process.

    Raises `DeviceError` with a document and both lists of ids when the two differ.
    """
    content = read_file(path)
    reference = _reference(content, vocabulary)
    fast = _try_fast(content, vocabulary) if choice == "auto" else None
    encoder = reference if fast is None or isinstance(fast, str) else fast
    return CheckedEncoder(encoder, reference, _pieces(content, vocabulary))


def explain_choice(content: bytes, vocabulary: Vocabulary, choice: EncoderChoice) -> str:
    """Which encoder `load_encoder` takes and why, in a line."""
    if choice == "reference":
        return 'the reference encodes: tokenizer.encoder = "reference"'
    if vocabulary.kind == "sentencepiece":  # without numba, which a process that only hands out tasks does not need
        obstacle, fast_name = obstacle_to_chunks(content), "chunk kernel"
    else:
        fast = _try_fast(content, vocabulary)
        obstacle, fast_name = (fast, "") if isinstance(fast, str) else (None, fast.name)
    return f"{reference_name(vocabulary)} itself encodes, because {obstacle}" if obstacle else f"{fast_name} encodes"


def reference_name(vocabulary: Vocabulary) -> str:
    """The library that defines the ids, and its version."""
    package = "tokenizers" if vocabulary.kind == "tokenizer_json" else vocabulary.kind
    return f"{package} {importlib.metadata.version(package)}"


@lru_cache(maxsize=1)
def _try_fast(content: bytes, vocabulary: Vocabulary) -> Encoder | str:
    """The fast encoder of this kind, or why none may be used, in words that follow "because".

    Each kind loads its own libraries, and no other's.
    """
    if vocabulary.kind == "sentencepiece":
        if obstacle := obstacle_to_chunks(content):
            return obstacle
        from services.tokenizer.encoding.chunk_encoder import ChunkEncoder  # noqa: PLC0415

        return ChunkEncoder.from_model(content)
    from services.tokenizer.encoding.byte_level import FastokensEncoder  # noqa: PLC0415

    make = FastokensEncoder.from_json if vocabulary.kind == "tokenizer_json" else FastokensEncoder.from_tiktoken
    try:
        return make(content, vocabulary.bos_id, vocabulary.eos_id, vocabulary.vocab_size)
    except ValueError as error:
        return f"fastokens cannot read it ({error})"


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


def _pieces(content: bytes, vocabulary: Vocabulary) -> list[str]:
    """What fuzz is made of."""
    if vocabulary.kind == "sentencepiece":
        processor = load_model(content)
        return [str(processor.id_to_piece(index)) for index in range(vocabulary.vocab_size)]
    fields: dict[str, Any] = json.loads(content) if vocabulary.kind == "tokenizer_json" else {}
    vocab = fields.get("model", {}).get("vocab", {})
    return list(vocab) if isinstance(vocab, dict) else []
