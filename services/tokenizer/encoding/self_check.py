"""Compares an encoder with its reference, on this machine and for this vocabulary, before its ids are used."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from services.common.errors import DeviceError
from services.tokenizer.encoding.encoder import Encoder, Offsets, TokenIds
from services.tokenizer.text_batch import TextBatch

FUZZ_DOCUMENTS = 400
SAMPLED_DOCUMENTS = 2_000
SAMPLED_BYTES = 2**20
"""Bytes of the corpus's text that are compared. SentencePiece takes 0.2 s for them."""
SAMPLED_BYTES_OF_A_DOCUMENT = 2**16
"""Bytes of one document that are compared. SentencePiece takes 40 times a document's size in memory."""

_SHOWN_IDS = 60
_CONTROL_TEXT = ("<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "[INST]", "<|begin_of_text|>", "<|end_of_text|>")
_SPACES = (" ", "  ", "   ", " " * 15, " " * 16, " " * 33)
_WHITESPACE = (*_SPACES, "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2581", "\u2581\u2581")
# Ranges of code points: Latin with accents, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Han, Hangul,
# symbols, emoji, supplementary planes, combining marks, control characters, private use and noncharacters.
_SCRIPTS = (
    *((0x20, 0x7F), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939)),
    *((0xE01, 0xE3A), (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x2000, 0x2BFF), (0x1F300, 0x1FAFF)),
    *((0x10000, 0x1FFFF), (0x300, 0x36F), (0x0, 0x1F), (0xE000, 0xFFFD), (0xFDD0, 0xFDEF), (0x10FFF0, 0x10FFFF)),
)


class CheckedEncoder:
    """An encoder that is compared with its reference: on fuzz in the constructor, and on the first documents that
    `encode` gets. One difference raises `DeviceError`.
    """

    def __init__(self, encoder: Encoder, reference: Encoder, pieces: Sequence[str]) -> None:
        self._encoder, self._reference = encoder, reference
        self.name = encoder.name
        self._documents_checked = 0
        self._documents_left, self._bytes_left = SAMPLED_DOCUMENTS, SAMPLED_BYTES
        self._check(TextBatch.of(fuzz_documents(pieces, FUZZ_DOCUMENTS)))

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        if self._documents_left > 0 and self._bytes_left > 0:
            sample = batch.begins_of_documents(SAMPLED_BYTES_OF_A_DOCUMENT)
            is_sampled = np.cumsum(sample.sizes) <= self._bytes_left
            is_sampled[self._documents_left :] = False
            sample = sample.select(is_sampled)
            self._check(sample)
            self._documents_left -= len(sample)
            self._bytes_left -= sample.text_bytes
        return self._encoder.encode(batch)

    def take_documents_checked(self) -> int:
        """Return how many documents were compared since the last call of this method."""
        checked, self._documents_checked = self._documents_checked, 0
        return checked

    def _check(self, batch: TextBatch) -> None:
        if self._encoder is self._reference:
            return
        different = find_difference(self._encoder, self._reference, batch)
        if different is not None:
            raise DeviceError(_explain(self._encoder, self._reference, different))
        self._documents_checked += len(batch)


def find_difference(encoder: Encoder, reference: Encoder, batch: TextBatch) -> bytes | None:
    """Return the first document of the batch that the two encode differently, or None."""
    ids, offsets = encoder.encode(batch)
    expected_ids, expected_offsets = reference.encode(batch)
    if np.array_equal(offsets, expected_offsets) and np.array_equal(ids, expected_ids):
        return None
    for index, document in enumerate(batch.views()):
        found = ids[offsets[index] : offsets[index + 1]]
        if not np.array_equal(found, expected_ids[expected_offsets[index] : expected_offsets[index + 1]]):
            return bytes(document)
    return None


def fuzz_documents(pieces: Sequence[str], count: int, seed: int = 0) -> list[bytes]:
    """Make documents of text on which tokenizers have bugs: random sequences of pieces, characters of all scripts,
    unknown characters, long repetitions, and the text of special tokens. Equal arguments give equal documents.
    """
    chosen = random.Random(seed)
    return [_fuzz(pieces, chosen).encode() for _ in range(count)]


def _fuzz(pieces: Sequence[str], chosen: random.Random) -> str:
    parts: list[str] = []
    script = chosen.choice(_SCRIPTS)
    for _ in range(chosen.choice((0, 1, 2, 5, 10, 30))):
        match chosen.randrange(8):
            case 0 | 1 | 2 if pieces:
                part = chosen.choice(pieces).replace("\u2581", chosen.choice((" ", "", "\u2581")))
            case 3:
                part = chosen.choice(_CONTROL_TEXT)
            case 4:
                part = chosen.choice(_WHITESPACE)
            case 5:
                script = chosen.choice(_SCRIPTS)
                part = chr(chosen.randint(*script))
            case 6:
                part = str(chosen.randrange(10 ** chosen.randint(1, 12)))
            case _:
                part = "".join(chr(chosen.randint(*script)) for _ in range(chosen.randint(1, 6)))
        parts.append(part * chosen.choice((1, 1, 1, 1, 1, 2, 3, 40)))
    return "".join(parts)


def _explain(encoder: Encoder, reference: Encoder, document: bytes) -> str:
    document = _shrink(encoder, reference, document)
    batch = TextBatch.of([document])
    (found, _), (expected, _) = encoder.encode(batch), reference.encode(batch)
    return (
        f"{encoder.name} gives other ids than {reference.name} for a document. Nothing was published.\n"
        f"  document  {document.decode()!r}\n"
        f"  found     {_show(found)}\n"
        f"  expected  {_show(expected)}\n"
        f'Set tokenizer.encoder = "reference" to encode with {reference.name}, and report this document.'
    )


def _shrink(encoder: Encoder, reference: Encoder, document: bytes) -> bytes:
    """Return a smaller document that the two still encode differently: cut it from either end as long as they do."""
    text = document.decode()
    step = len(text) // 2
    while step:
        shorter = [text[:-step], text[step:]]
        batch = TextBatch.of([each.encode() for each in shorter])
        different = find_difference(encoder, reference, batch)
        if different is None:
            step //= 2
        else:
            text = different.decode()
            step = min(step, len(text) // 2)
    return text.encode()


def _show(ids: TokenIds) -> str:
    shown = ids[:_SHOWN_IDS].tolist()
    return f"{shown}" if len(ids) <= _SHOWN_IDS else f"{str(shown)[:-1]}, ... {len(ids):,} in all]"
