"""Conversion between text and token ids by the library that defines a vocabulary, for prompts and samples.

`services.tokenizer` encodes corpora: it returns the same ids, and is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.corpus import Vocabulary
from services.common.errors import ArtifactError, unreadable


class Codec(NamedTuple):
    """Functions that convert text to token ids and back."""

    encode: Callable[[str], list[int]]
    """Return the ids of a text, without BOS and EOS. The name of a special token in it is encoded as text."""
    decode: Callable[[list[int]], str]
    """Return the text of ids of the vocabulary."""


def load_codec(path: Path, vocabulary: Vocabulary) -> Codec:
    """Load the codec of a vocabulary's file. Raises `ArtifactError` where the library of its kind refuses the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if not content:  # SentencePiece accepts it as a model without pieces
        raise ArtifactError(f"{path} is empty, so it is no tokenizer file.")
    try:
        return _load(content, path.parent, vocabulary)
    except (ArtifactError, RuntimeError, ValueError, TypeError, AttributeError) as error:  # as the libraries raise
        raise ArtifactError(f"{path} is no {vocabulary.kind} tokenizer file: {error}") from error


def _load(content: bytes, folder: Path, vocabulary: Vocabulary) -> Codec:
    match vocabulary.kind:
        case "sentencepiece":
            import sentencepiece  # noqa: PLC0415

            processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            return Codec(processor.encode, lambda ids: str(processor.decode(ids)))
        case "tiktoken":
            from services.common.vocabularies.tiktoken_file import load_encoding  # noqa: PLC0415

            encoding = load_encoding(content)
            return Codec(lambda text: encoding.encode(text, disallowed_special=()), encoding.decode)
        case "tokenizer_json":
            from services.common.vocabularies.tokenizer_json import load_tokenizer  # noqa: PLC0415

            tokenizer = load_tokenizer(content)
            return Codec(
                lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
                lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            )
        case "hugging_face":
            from services.common.vocabularies.hugging_face import encode_texts, load_folder  # noqa: PLC0415

            theirs = load_folder(folder)
            return Codec(
                lambda text: encode_texts(theirs, [text])[0],
                lambda ids: str(theirs.decode(ids, skip_special_tokens=False)),
            )
