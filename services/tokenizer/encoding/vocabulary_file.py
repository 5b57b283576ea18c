"""The three kinds of file that hold a vocabulary, told apart by their content, and the encoder for each."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from services.common.artifacts.corpus import Vocabulary, VocabularyKind
from services.common.errors import ArtifactError
from services.common.recipe import Tokenizer
from services.tokenizer.encoding.chunk_tables import obstacle_to_chunks
from services.tokenizer.encoding.encoder import Encoder
from services.tokenizer.encoding.self_check import CheckedEncoder
from services.tokenizer.encoding.sentencepiece_model import load_model

logger = logging.getLogger(__name__)

EncoderChoice = Literal["auto", "reference"]

PATH_IN_CORPUS: dict[VocabularyKind, str] = {
    "sentencepiece": "tokenizer/tokenizer.model",
    "tokenizer_json": "tokenizer/tokenizer.json",
    "tiktoken": "tokenizer/tokenizer.tiktoken",
}
# The special tokens around a document, where a tokenizer.json does not say which they are: Llama 3's and Llama 2's.
_KNOWN_BORDERS = (("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"))


def describe_vocabulary(content: bytes, settings: Tokenizer) -> Vocabulary:
    """Raises `ArtifactError` for what is no vocabulary, or has no tokens to put around a document."""
    kind: VocabularyKind
    if content.lstrip()[:1] == b"{":
        kind = "tokenizer_json"
        vocab_size, bos_id, eos_id = _describe_json(content, settings)
    elif _looks_like_tiktoken(content):
        kind = "tiktoken"
        vocab_size, bos_id, eos_id = _describe_tiktoken(content)
    else:
        kind = "sentencepiece"
        vocab_size, bos_id, eos_id = _describe_sentencepiece(content)
    return Vocabulary(
        kind=kind,
        path=PATH_IN_CORPUS[kind],
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
    )


@lru_cache(maxsize=1)
def load_encoder(path: Path, vocabulary: Vocabulary, choice: EncoderChoice) -> CheckedEncoder:
    """The encoder of a vocabulary, checked against its reference; loaded once per process.

    Raises `DeviceError` with a document and both lists of ids when the two differ.
    """
    content = path.read_bytes()
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


def _describe_sentencepiece(content: bytes) -> tuple[int, int, int]:
    explanation = (
        "no vocabulary: neither a SentencePiece model, nor a tokenizer.json, nor a tiktoken file. "
        "tokenizer.model names one of the three."
    )
    if not content:  # SentencePiece takes it for a model without pieces
        raise ArtifactError(explanation)
    try:
        processor = load_model(content)
    except ArtifactError as error:
        raise ArtifactError(explanation) from error
    if min(processor.bos_id(), processor.eos_id()) < 0:
        raise ArtifactError("has no BOS or no EOS piece, and every document is stored between the two.")
    if not any(processor.is_byte(piece) for piece in range(processor.vocab_size())):
        logger.warning("the vocabulary has no byte pieces: characters it does not know become <unk> and are lost")
    return processor.vocab_size(), processor.bos_id(), processor.eos_id()


def _describe_json(content: bytes, settings: Tokenizer) -> tuple[int, int, int]:
    try:
        fields = json.loads(content)
        vocab, added = fields["model"]["vocab"], fields.get("added_tokens") or []
        ids: dict[str, int] = {token["content"]: token["id"] for token in added if token.get("special", True)}
        in_text = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max([*in_text, *(token["id"] for token in added), -1])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"JSON, but not a tokenizer.json of Hugging Face ({error!r}).") from error
    known = [pair for pair in _KNOWN_BORDERS if ids.keys() >= set(pair)]
    bos, eos = (
        (settings.bos_token, settings.eos_token)
        if settings.bos_token and settings.eos_token
        else (known or [("", "")])[0]
    )
    if bos not in ids or eos not in ids:
        raise ArtifactError(
            f"every document is stored between two special tokens, and which is not known here. "
            f"Set tokenizer.bos_token and tokenizer.eos_token to two of its special tokens: "
            f"{', '.join(list(ids)[:20]) or 'it has none'}."
        )
    _require_tokenizer(content)
    return largest + 1, ids[bos], ids[eos]


def _require_tokenizer(content: bytes) -> None:
    import tokenizers  # noqa: PLC0415

    try:
        tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ArtifactError(
            f"JSON, but not a tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}."
        ) from error


def _looks_like_tiktoken(content: bytes) -> bool:
    fields = content[: content.find(b"\n")].split()
    return len(fields) == 2 and fields[1].isdigit()


def _describe_tiktoken(content: bytes) -> tuple[int, int, int]:
    from services.common.vocabularies.tiktoken_file import LLAMA3_SPECIAL_TOKENS, read_ranks  # noqa: PLC0415

    num_ranks = len(read_ranks(content))
    return num_ranks + len(LLAMA3_SPECIAL_TOKENS), num_ranks, num_ranks + 1


def _pieces(content: bytes, vocabulary: Vocabulary) -> list[str]:
    """What fuzz is made of."""
    if vocabulary.kind == "sentencepiece":
        processor = load_model(content)
        return [str(processor.id_to_piece(index)) for index in range(vocabulary.vocab_size)]
    fields: dict[str, Any] = json.loads(content) if vocabulary.kind == "tokenizer_json" else {}
    vocab = fields.get("model", {}).get("vocab", {})
    return list(vocab) if isinstance(vocab, dict) else []
