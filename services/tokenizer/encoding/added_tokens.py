"""Added tokens of a tokenizer.json: what `</s>` typed in a document must not become."""

from __future__ import annotations

import json


def take_text_as_text(tokenizer: bytes) -> bytes:
    """A tokenizer.json in which every added token is special: encoders can leave the text of those alone."""
    fields = json.loads(tokenizer)
    for token in fields.get("added_tokens") or []:
        token["special"] = True
    return json.dumps(fields).encode()
