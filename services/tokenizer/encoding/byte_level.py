"""The fast encoder for byte-level BPE such as Llama 3's, whose vocabularies are `tokenizer.json` or tiktoken files."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path

import fastokens
import numpy as np

from services.common.artifacts.corpus import Vocabulary
from services.common.vocabularies.tiktoken_file import LLAMA3_PATTERN
from services.common.vocabularies.tokenizer_json import read_added_tokens
from services.tokenizer.encoding.encoder import Offsets, TokenIds, join_documents
from services.tokenizer.text_batch import TextBatch


class FastokensEncoder:
    """fastokens, at 6 times tiktoken's speed. It uses all cores of the machine."""

    def __init__(self, content: bytes, vocabulary: Vocabulary) -> None:
        """Raises `ValueError` for a vocabulary that fastokens does not read."""
        self._tokenizer, self._vocabulary = _load(content, vocabulary), vocabulary
        self.name = f"fastokens {importlib.metadata.version('fastokens')}"

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        texts = [document.decode() for document in batch.documents()]
        flat, ends = self._tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        ids, offsets = np.frombuffer(flat, np.uint32), np.frombuffer(ends, np.uint64).astype(np.int64)
        return join_documents(np.split(ids, offsets[1:-1]) if texts else [], self._vocabulary)


def _load(content: bytes, vocabulary: Vocabulary) -> fastokens.Tokenizer:
    if vocabulary.kind == "tiktoken":
        with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
            path = Path(folder) / "tokenizer.tiktoken"
            path.write_bytes(content)
            return fastokens.Tokenizer.from_tiktoken(str(path), pattern=LLAMA3_PATTERN, special_tokens={})
    tokenizer = fastokens.Tokenizer.from_json_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def obstacle_to_fastokens(tokenizer: bytes) -> str | None:
    """Return why fastokens must not encode for a tokenizer.json, as the end of a sentence with "because", or None.

    Beside these obstacles, fastokens 0.3.5 agreed with tokenizers 0.23 on fuzz of a thousand random vocabularies.
    """
    added = read_added_tokens(tokenizer)
    matched = [token for token in added if not token.special]
    flagged = [token.content for token in matched if token.lstrip or token.rstrip or token.single_word]
    if flagged:
        return f"the added token {flagged[0]!r} has lstrip, rstrip or single_word"
    for token in matched:
        for other in added:
            # tokenizers finds tokens of the other kind in another pass, and a special one hides what it covers.
            is_apart = other.special or other.normalized != token.normalized
            if is_apart and _can_overlap(token.content, other.content):
                return f"the added tokens {token.content!r} and {other.content!r} can overlap"
    fields = json.loads(tokenizer)
    vocab = fields["model"]["vocab"]
    if isinstance(vocab, dict) and '"ByteLevel"' not in json.dumps(fields.get("pre_tokenizer")):
        # fastokens finds such a piece in a text, `</s>` too, although no merges lead to it.
        for piece in vocab:
            if any(character not in vocab for character in piece):
                return f"the model has no pieces for the characters of {piece!r}"
    return None


def _can_overlap(first: str, second: str) -> bool:
    """Return whether a text can hold the two with a character in common."""
    if first in second or second in first:
        return True
    sizes = range(1, min(len(first), len(second)))
    return any(first.endswith(second[:size]) or second.endswith(first[:size]) for size in sizes)
