"""Hugging Face's `tokenizer.json`, loaded so that `</s>` in a document stays text."""

from __future__ import annotations

import json
from typing import Any

import tokenizers


def load_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    """Load the tokenizer of a file, without truncation and padding. Encode with `add_special_tokens=False`."""
    tokenizer = tokenizers.Tokenizer.from_buffer(take_text_as_text(content))
    tokenizer.encode_special_tokens = True  # their names in a text are encoded as text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def take_text_as_text(content: bytes) -> bytes:
    """Return a tokenizer.json in which every added token is special, so that encoders can treat their names as text."""
    fields = json.loads(content)
    for token in fields.get("added_tokens") or []:
        token["special"] = True
    return json.dumps(fields).encode()


def read_rules(content: bytes) -> dict[str, Any]:
    """Return the fields of a tokenizer.json that decide the ids of a text, without those that put ids around it."""
    fields: dict[str, Any] = json.loads(load_tokenizer(content).to_str())
    return {name: value for name, value in fields.items() if name != "post_processor"}
