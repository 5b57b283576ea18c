"""Text to ids and back, by the library that defines a vocabulary: for prompts and samples that people write and read.

Corpora come from `services.tokenizer`, which gives the same ids faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.common.artifacts.corpus import Vocabulary


class Codec(NamedTuple):
    encode: Callable[[str], list[int]]
    """Without BOS and EOS; the text of a special token is text."""
    decode: Callable[[list[int]], str]
    """Raises `LookupError` for an id that is not in the vocabulary."""


def load_codec(content: bytes, vocabulary: Vocabulary) -> Codec:
    """The codec of a vocabulary's file. Each kind loads its own library, and no other's."""
    match vocabulary.kind:
        case "sentencepiece":
            import sentencepiece  # noqa: PLC0415

            processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            return Codec(processor.encode, lambda ids: str(processor.decode(ids)))
        case "tokenizer_json":
            from services.common.vocabularies.tokenizer_json import load_tokenizer  # noqa: PLC0415

            tokenizer = load_tokenizer(content)

            def decode(ids: list[int]) -> str:
                unknown = [token for token in ids if token >= vocabulary.vocab_size]  # decode() leaves them out
                if unknown:
                    raise LookupError(f"{unknown[0]:,} is none")
                return str(tokenizer.decode(ids, skip_special_tokens=False))

            return Codec(lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), decode)
        case "tiktoken":
            from services.common.vocabularies.tiktoken_file import load_encoding  # noqa: PLC0415

            encoding = load_encoding(content)
            return Codec(lambda text: encoding.encode(text, disallowed_special=()), encoding.decode)
