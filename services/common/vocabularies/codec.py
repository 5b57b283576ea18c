"""Conversion between text and token ids by the library that defines a vocabulary: the reference of the tokenizer's fast
encoders, which return the same ids.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Vocabulary
from services.common.errors import ArtifactError, unreadable


class Codec(NamedTuple):
    """Functions that convert text to token ids and back."""

    encode_documents: Callable[[list[bytes]], list[npt.NDArray[Any]]]
    """Return the ids of UTF-8 texts, without BOS and EOS. The name of a special token in them is encoded as text."""
    decode: Callable[[list[int]], str]
    """Return the text of ids of the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as `encode_documents` does."""
        ids: list[int] = self.encode_documents([text.encode()])[0].tolist()
        return ids


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
    """Load the codec of a kind. Only the library of the kind is imported."""
    match vocabulary.kind:
        case "sentencepiece":
            from services.common.vocabularies.sentencepiece_model import load_model  # noqa: PLC0415

            processor = load_model(content)
            return Codec(
                lambda documents: processor.encode(documents, out_type="numpy", num_threads=1),
                lambda ids: str(processor.decode(ids)),
            )
        case "tiktoken":
            from services.common.vocabularies.tiktoken_file import load_encoding  # noqa: PLC0415

            encoding = load_encoding(content)
            return Codec(
                lambda documents: [
                    encoding.encode_to_numpy(each.decode(), disallowed_special=()) for each in documents
                ],
                encoding.decode,
            )
        case "tokenizer_json":
            return load_json(content)
        case "hugging_face":
            from services.common.vocabularies.hugging_face import encode_texts, load_folder  # noqa: PLC0415

            theirs = load_folder(folder)
            return Codec(
                lambda documents: [
                    np.array(ids, np.uint32) for ids in encode_texts(theirs, [each.decode() for each in documents])
                ],
                lambda ids: str(theirs.decode(ids, skip_special_tokens=False)),
            )


def load_json(content: bytes) -> Codec:
    """Load the codec of a tokenizer.json. Raises `ArtifactError` where tokenizers does not read it."""
    from services.common.vocabularies.tokenizer_json import load_tokenizer  # noqa: PLC0415

    try:
        tokenizer = load_tokenizer(content)
    except ValueError as error:
        raise ArtifactError(f"tokenizers cannot load the tokenizer.json: {error}.") from error

    def encode(documents: list[bytes]) -> list[npt.NDArray[Any]]:
        try:
            encoded = tokenizer.encode_batch_fast([each.decode() for each in documents], add_special_tokens=False)
        except Exception as error:  # the only class that tokenizers raises
            raise ArtifactError(f"the tokenizer cannot encode a text: {error}.") from error
        return [np.array(each.ids, np.uint32) for each in encoded]

    return Codec(encode, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
