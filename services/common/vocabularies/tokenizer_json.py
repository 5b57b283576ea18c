"""A `tokenizer.json` of Hugging Face, read so that `</s>` typed in a document stays text."""

from __future__ import annotations

import json

import tokenizers


def load_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    """What the file says, without truncation and padding. It encodes with `add_special_tokens=False`."""
    tokenizer = tokenizers.Tokenizer.from_buffer(take_text_as_text(content))
    tokenizer.encode_special_tokens = True  # their text is text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def take_text_as_text(content: bytes) -> bytes:
    """A tokenizer.json in which every added token is special: encoders can leave the text of those alone."""
    fields = json.loads(content)
    for token in fields.get("added_tokens") or []:
        token["special"] = True
    return json.dumps(fields).encode()
