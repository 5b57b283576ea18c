"""Text to ids and back, by the library that defines a vocabulary: for prompts and samples that people write and read.

Corpora come from `services.tokenizer`, which gives the same ids faster.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.corpus import Vocabulary, VocabularyKind
from services.common.errors import ArtifactError
from services.common.input_file import read_file, unreadable


class Codec(NamedTuple):
    encode: Callable[[str], list[int]]
    """Without BOS and EOS; the text of a special token is text."""
    decode: Callable[[list[int]], str]
    """Raises `LookupError` for an id that is not in the vocabulary."""


def load_codec(path: Path, vocabulary: Vocabulary) -> Codec:
    """The codec of a vocabulary's file, which `listed_file` has checked. Each kind loads its own library alone.

    Raises `ArtifactError` when that library does not take the file.
    """
    try:
        content = read_file(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not content:  # SentencePiece takes it for a model without pieces
        raise ArtifactError(f"{path}: has no bytes, so it is no vocabulary.")
    try:
        codec = _LOADERS[vocabulary.kind](content, vocabulary)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # what the libraries raise for other files
        raise ArtifactError(f"{path}: is no {vocabulary.kind} vocabulary: {error}") from error

    def encode(text: str) -> list[int]:
        ids = codec.encode(text)
        if max(ids, default=0) >= vocabulary.vocab_size:
            raise ArtifactError(
                f"{path}: makes the id {max(ids):,} of a text, the manifest says it has {vocabulary.vocab_size:,}."
            )
        return ids

    return codec._replace(encode=encode)


def _load_sentencepiece(content: bytes, vocabulary: Vocabulary) -> Codec:
    import sentencepiece  # noqa: PLC0415

    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    return Codec(processor.encode, lambda ids: str(processor.decode(ids)))


def _load_tokenizer_json(content: bytes, vocabulary: Vocabulary) -> Codec:
    from services.common.vocabularies.tokenizer_json import load_tokenizer  # noqa: PLC0415

    tokenizer = load_tokenizer(content)

    def decode(ids: list[int]) -> str:
        unknown = [token for token in ids if token >= vocabulary.vocab_size]  # decode() leaves them out
        if unknown:
            raise LookupError(f"{unknown[0]:,} is none")
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return Codec(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), decode)


def _load_tiktoken(content: bytes, vocabulary: Vocabulary) -> Codec:
    from services.common.vocabularies.tiktoken_file import load_encoding  # noqa: PLC0415

    encoding = load_encoding(content)
    return Codec(lambda text: encoding.encode(text, disallowed_special=()), encoding.decode)


_LOADERS: dict[VocabularyKind, Callable[[bytes, Vocabulary], Codec]] = {
    "sentencepiece": _load_sentencepiece,
    "tokenizer_json": _load_tokenizer_json,
    "tiktoken": _load_tiktoken,
}
