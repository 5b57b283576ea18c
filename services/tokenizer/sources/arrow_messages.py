"""Reads the sizes that Arrow's messages declare, before Arrow reads or decompresses a message.

Arrow reads a message of any declared length as a whole, and decompresses buffers to any declared length. The lengths
are in a message's metadata, which is a flatbuffer: `Message` and `RecordBatch` of
https://github.com/apache/arrow/blob/main/format/Message.fbs, and `Footer` of File.fbs.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

FILE_FORMAT = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


@dataclass(frozen=True)
class Message:
    """The place of a message in a file, and the sizes that it declares."""

    begin: int
    """Position of the message's first byte in the file."""
    end: int
    """Position behind the message's last byte in the file."""
    metadata_bytes: int
    decoded_bytes: int
    """Bytes of the message's body after all buffers are decompressed."""
    is_record_batch: bool


def read_message(file: BinaryIO, begin: int) -> Message | None:
    """Read the metadata of the message at a position. Return None at the end of a stream.

    Raises `pa.ArrowInvalid` when no message is there.
    """
    file.seek(begin)
    prefix = file.read(8)
    if len(prefix) < 4:
        return None
    metadata_begin, length = begin + 8, _integer("<i", prefix, 4) if prefix[:4] == CONTINUATION else -1
    if prefix[:4] != CONTINUATION:  # the format before Arrow 0.15
        metadata_begin, length = begin + 4, _integer("<i", prefix, 0)
    if length == 0:
        return None
    if length < 0 or length > file.seek(0, os.SEEK_END) - metadata_begin:
        raise pa.ArrowInvalid(f"at byte {begin:,}: the message declares {length:,} bytes of metadata")
    file.seek(metadata_begin)
    table = _Table.root(file.read(length))
    body_bytes, kind = table.integer(3, "<q"), table.integer(1, "<B")
    body_begin = metadata_begin + length
    if body_bytes < 0:
        raise pa.ArrowInvalid(f"at byte {begin:,}: the message declares {body_bytes:,} bytes")
    header = table.table(2)
    if header is not None and kind == _DICTIONARY_BATCH:
        header = header.table(1)
    decoded_bytes = body_bytes
    if header is not None and kind in (_DICTIONARY_BATCH, _RECORD_BATCH) and header.table(3) is not None:
        decoded_bytes = max(body_bytes, _decoded_bytes(file, header, body_begin))
    return Message(begin, body_begin + body_bytes, length, decoded_bytes, kind == _RECORD_BATCH)


def read_blocks(file: BinaryIO) -> tuple[list[int], list[int]]:
    """Return the positions of a file's dictionaries, and those of its record batches, from the footer.

    Raises `pa.ArrowInvalid` for a damaged footer.
    """
    tail_bytes = 4 + len(FILE_FORMAT)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    length = _integer("<i", tail, 0)
    if not tail.endswith(FILE_FORMAT) or not 0 < length <= size - tail_bytes:
        raise pa.ArrowInvalid("the file has no footer: it is cut off, or still being written")
    file.seek(size - tail_bytes - length)
    footer = _Table.root(file.read(length))
    # A block is an offset of 64 bits, the metadata's length of 32, 32 bits of padding, and the body's length of 64.
    begins = [[_integer("<q", block, 0) for block in footer.structs(field, 24)] for field in (2, 3)]
    if any(begin < 0 for field in begins for begin in field):
        raise pa.ArrowInvalid("the footer has a record batch at a negative position")
    return begins[0], begins[1]


def _decoded_bytes(file: BinaryIO, batch: _Table, body_begin: int) -> int:
    """Add up the decompressed sizes of a record batch's buffers.

    A buffer begins with its decompressed length, or with -1 when it is not compressed.
    """
    total = 0
    for buffer in batch.structs(2, 16):
        offset, length = _integer("<q", buffer, 0), _integer("<q", buffer, 8)
        if length <= 0:
            continue
        if offset < 0:
            raise pa.ArrowInvalid(f"at byte {body_begin:,}: a buffer begins before its message")
        file.seek(body_begin + offset)
        declared = _integer("<q", file.read(8), 0)
        total += length if declared < 0 else declared
    return total


class _Table:
    """A table of a flatbuffer. Its methods raise `pa.ArrowInvalid` for an offset that points outside of the buffer."""

    def __init__(self, content: bytes, begin: int) -> None:
        self._content, self._begin = content, begin
        self._offsets = begin - _integer("<i", content, begin)
        self._offsets_bytes = _integer("<H", content, self._offsets)

    @classmethod
    def root(cls, content: bytes) -> _Table:
        return cls(content, _integer("<I", content, 0))

    def integer(self, field: int, kind: str) -> int:
        """Return the integer in a field. A missing field is 0, the default in all of Arrow's tables."""
        place = self._place(field)
        return 0 if place is None else _integer(kind, self._content, place)

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return None if place is None else _Table(self._content, place + _integer("<I", self._content, place))

    def structs(self, field: int, size: int) -> list[bytes]:
        place = self._place(field)
        if place is None:
            return []
        begin = place + _integer("<I", self._content, place)
        count = _integer("<I", self._content, begin)
        if begin + 4 + count * size > len(self._content):
            raise pa.ArrowInvalid("an offset in the metadata points behind the metadata's end")
        return [self._content[at : at + size] for at in range(begin + 4, begin + 4 + count * size, size)]

    def _place(self, field: int) -> int | None:
        at = 4 + 2 * field
        offset = _integer("<H", self._content, self._offsets + at) if at < self._offsets_bytes else 0
        return self._begin + offset if offset else None


def _integer(kind: str, content: bytes, begin: int) -> int:
    if begin < 0 or begin + struct.calcsize(kind) > len(content):
        raise pa.ArrowInvalid("an offset in the metadata points behind the metadata's end")
    return int(struct.unpack_from(kind, content, begin)[0])
