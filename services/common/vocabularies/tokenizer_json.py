"""Hugging Face's `tokenizer.json`, loaded as it is, so that `</s>` in a document stays text.

The file's added tokens are of two kinds. A special one (`</s>`, `<|im_end|>`) controls the model: its name in a text is
text. Any other (`<think>`, a run of spaces) is a token of the text, with its flags lstrip, rstrip, single_word and
normalized. `AutoTokenizer.from_pretrained(..., split_special_tokens=True)` does the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken

from services.common.errors import ArtifactError


def load_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    """Load the tokenizer of a file, without truncation and padding. Encode with `add_special_tokens=False`.

    Raises `ArtifactError` for added tokens on which the library itself fails, and for merges with dropout.
    """
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise ArtifactError(
            f"the merges have dropout {dropout:g}, which gives a text other ids each time. In tokenizer.json, set "
            f"model.dropout to null."
        )
    tokenizer.encode_special_tokens = True  # their names in a text are encoded as text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _require_ids_for_any_text(read_added_tokens(content))
    return tokenizer


def read_added_tokens(content: bytes) -> list[AddedToken]:
    """Return the added tokens of a file that tokenizers reads."""
    fields = json.loads(content).get("added_tokens") or []
    return [AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in fields]


def _require_ids_for_any_text(tokens: Sequence[AddedToken]) -> None:
    """Raise for a token that takes the white space behind it where another one begins with white space.

    tokenizers 0.23 takes that white space twice, and panics ("AddedVocabulary bad split").
    """
    stripping = [token.content for token in tokens if token.rstrip and not token.special]
    spaces = [token.content for token in tokens if token.content[:1].isspace() and not token.special]
    if stripping and spaces:
        raise ArtifactError(
            f"tokenizers {tokenizers.__version__} fails on the added token {spaces[0]!r} behind the added token "
            f"{stripping[0]!r} with rstrip. Remove one of them, or the rstrip."
        )
