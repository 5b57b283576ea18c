"""SentencePiece models: loading a model, and reading the settings by which it turns text into ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import sentencepiece

from services.common.errors import ArtifactError

# Field numbers of sentencepiece_model.proto. Nine fields need no generated code, and the Python classes that come with
# sentencepiece need a newer protobuf than the Neuron images have.
_PIECE, _TRAINER_SPEC, _NORMALIZER_SPEC = 1, 2, 3
_PIECE_KIND = 3
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX = 3, 24
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_WHITESPACES, _ESCAPE_WHITESPACES, _RULE_TSV = 2, 3, 4, 5, 6
_BPE = 2
_PIECE_KIND_TAG = bytes([3 << 3])

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class PieceKind(IntEnum):
    """The field `type` of a piece in sentencepiece_model.proto."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    """Such a piece is cut out of a text before anything is merged."""
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SentencePieceSettings:
    """Settings in a model's file, with the defaults of sentencepiece_model.proto for those that it leaves out."""

    is_bpe: bool
    changes_characters: bool
    """Whether a table of the normaliser replaces characters."""
    adds_dummy_prefix: bool
    removes_extra_whitespaces: bool
    escapes_whitespaces: bool
    puts_whitespace_last: bool
    piece_kinds: tuple[int, ...]
    """The `PieceKind` of every piece, in the order of their ids."""


def load_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Load a model from its bytes. Raises `ArtifactError` where they are no SentencePiece model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError) as error:
        raise ArtifactError(f"Not a SentencePiece model ({error}).") from error


@lru_cache(maxsize=1)  # 0.03 s in Python for 32,000 pieces
def read_settings(model: bytes) -> SentencePieceSettings:
    """Return the settings of a model that `load_model` has accepted."""
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    piece_kinds: list[int] = []
    for number, value in _fields(model):
        if isinstance(value, bytes):
            if number == _TRAINER_SPEC:
                trainer = dict(_fields(value))
            elif number == _NORMALIZER_SPEC:
                normalizer = dict(_fields(value))
            elif number == _PIECE:
                # Normal pieces have no field for their kind, and a search for its tag is faster than `_fields`.
                kind = dict(_fields(value)).get(_PIECE_KIND) if _PIECE_KIND_TAG in value else None
                piece_kinds.append(kind if isinstance(kind, int) else PieceKind.NORMAL)
    return SentencePieceSettings(
        is_bpe=trainer.get(_MODEL_TYPE, 1) == _BPE,
        changes_characters=bool(normalizer.get(_CHARSMAP) or normalizer.get(_RULE_TSV)),
        adds_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        removes_extra_whitespaces=bool(normalizer.get(_REMOVE_WHITESPACES, 1)),
        escapes_whitespaces=bool(normalizer.get(_ESCAPE_WHITESPACES, 1)),
        puts_whitespace_last=bool(trainer.get(_WHITESPACE_AS_SUFFIX, 0)),
        piece_kinds=tuple(piece_kinds),
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message (protobuf.dev/programming-guides/encoding)."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        value: int | bytes
        match tag & 7:
            case wire_type if wire_type == _VARINT:
                value, at = _read_varint(message, at)
            case wire_type if wire_type == _BYTES:
                size, at = _read_varint(message, at)
                value, at = message[at : at + size], at + size
            case wire_type if wire_type in (_FIXED32, _FIXED64):
                size = 4 if wire_type == _FIXED32 else 8
                value, at = message[at : at + size], at + size
            case wire_type:
                raise ArtifactError(f"Not a SentencePiece model (wire type {wire_type} at byte {at:,}).")
        yield tag >> 3, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
