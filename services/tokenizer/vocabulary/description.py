"""Describes a vocabulary's file: its kind, its size, and the ids of BOS and EOS."""

from __future__ import annotations

import hashlib
import json
import logging

from services.common.artifacts.corpus import Vocabulary, VocabularyKind
from services.common.errors import ArtifactError
from services.common.recipe.schema import Tokenizer
from services.common.vocabularies.sentencepiece_model import load_model

logger = logging.getLogger(__name__)

PATH_IN_CORPUS: dict[VocabularyKind, str] = {
    "sentencepiece": "tokenizer/tokenizer.model",
    "tokenizer_json": "tokenizer/tokenizer.json",
    "tiktoken": "tokenizer/tokenizer.tiktoken",
}
# BOS and EOS of Llama 3 and of Llama 2, for a tokenizer.json: the file does not name them.
_KNOWN_BORDERS = (("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"))


def describe_vocabulary(content: bytes, settings: Tokenizer) -> Vocabulary:
    """Describe the vocabulary in a file. The file's content decides its kind.

    Raises `ArtifactError` when the content is no vocabulary, or has no BOS or no EOS.
    """
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


def _describe_sentencepiece(content: bytes) -> tuple[int, int, int]:
    explanation = (
        "the file is no vocabulary: it is no SentencePiece model, no tokenizer.json and no tiktoken file. "
        "Set tokenizer.model to one of the three."
    )
    if not content:  # SentencePiece reads an empty file as a model without pieces
        raise ArtifactError(explanation)
    try:
        processor = load_model(content)
    except ArtifactError as error:
        raise ArtifactError(explanation) from error
    if min(processor.bos_id(), processor.eos_id()) < 0:
        raise ArtifactError("the model has no BOS or no EOS piece, and a corpus stores every document between the two.")
    if not any(processor.is_byte(piece) for piece in range(processor.vocab_size())):
        logger.warning("the vocabulary has no byte pieces: a character without a piece becomes <unk>, and is lost")
    return processor.vocab_size(), processor.bos_id(), processor.eos_id()


def _describe_json(content: bytes, settings: Tokenizer) -> tuple[int, int, int]:
    try:
        fields = json.loads(content)
        vocab, added = fields["model"]["vocab"], fields.get("added_tokens") or []
        ids: dict[str, int] = {token["content"]: token["id"] for token in added if token.get("special", True)}
        in_text = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max([*in_text, *(token["id"] for token in added), -1])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"the file is JSON, but no tokenizer.json of Hugging Face ({error!r}).") from error
    known = [pair for pair in _KNOWN_BORDERS if ids.keys() >= set(pair)]
    bos, eos = (
        (settings.bos_token, settings.eos_token)
        if settings.bos_token and settings.eos_token
        else (known or [("", "")])[0]
    )
    if bos not in ids or eos not in ids:
        raise ArtifactError(
            f"the file does not say which special tokens are BOS and EOS, and a corpus stores every document between "
            f"the two. Set tokenizer.bos_token and tokenizer.eos_token to two of the file's special tokens: "
            f"{', '.join(list(ids)[:20]) or 'it has none'}."
        )
    _check_tokenizer(content, (bos, eos))
    return largest + 1, ids[bos], ids[eos]


def _check_tokenizer(content: bytes, special: tuple[str, str]) -> None:
    """Raise `ArtifactError` for a file that tokenizers does not read, and warn where its model has control tokens."""
    import tokenizers  # noqa: PLC0415

    from services.common.vocabularies.tokenizer_json import load_tokenizer  # noqa: PLC0415

    try:
        tokenizer = load_tokenizer(content)
    except ValueError as error:
        raise ArtifactError(
            f"the file is JSON, but no tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}."
        ) from error
    for token in special:
        if tokenizer.token_to_id(token) in tokenizer.encode(token, add_special_tokens=False).ids:
            logger.warning(
                "the vocabulary's model has %s as a piece of text: in a document it becomes that token", token
            )


def _looks_like_tiktoken(content: bytes) -> bool:
    fields = content[: content.find(b"\n")].split()
    return len(fields) == 2 and fields[1].isdigit()


def _describe_tiktoken(content: bytes) -> tuple[int, int, int]:
    from services.common.vocabularies.tiktoken_file import LLAMA3_SPECIAL_TOKENS, read_ranks  # noqa: PLC0415

    num_ranks = len(read_ranks(content))
    return num_ranks + len(LLAMA3_SPECIAL_TOKENS), num_ranks, num_ranks + 1
