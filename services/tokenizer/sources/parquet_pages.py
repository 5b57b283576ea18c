"""Reads the sizes in the headers of Parquet's pages, before a page is decompressed.

A decoder uses the page's header, and a footer may say something else. The header is `PageHeader` of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift in Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

MAX_HEADER_BYTES = 16 * 2**20
"""Bytes of the largest page header that is read, as in Arrow's reader. It holds the page's minimum and maximum."""
_FIRST_BYTES = 2**14
_MAX_DEPTH = 8

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


@dataclass(frozen=True)
class Page:
    """The place of a page in a file, and what its header says."""

    begin: int
    """Position of the header's first byte in the file."""
    compressed_bytes: int
    decoded_bytes: int
    num_values: int
    """Number of values, with nulls. It is 0 in a page without values."""
    is_dictionary: bool
    repeats_text: bool
    """Whether values may share text, so that all values together are larger than the page.

    Values of a dictionary do, and so do values that are encoded as a difference to the one before.
    """


def read_pages(file: BinaryIO, begin: int, num_bytes: int, num_values: int) -> Iterator[Page]:
    """Yield the pages of a column chunk, up to the page with its last value.

    Raises `pa.ArrowInvalid` for a header that cannot be read.
    """
    position, values_left = begin, num_values
    while values_left > 0 and position < begin + num_bytes:
        page, header_bytes = _read_page(file, position)
        yield page
        values_left -= 0 if page.is_dictionary else page.num_values
        position += header_bytes + page.compressed_bytes


def _read_page(file: BinaryIO, begin: int) -> tuple[Page, int]:
    window = _FIRST_BYTES
    while True:
        file.seek(begin)
        parser = _Thrift(file.read(window))
        try:
            return _to_page(parser.read_struct(), begin), parser.position
        except IndexError as error:  # the header is longer than the window
            if len(parser.content) < window or window >= MAX_HEADER_BYTES:
                raise pa.ArrowInvalid(f"at byte {begin:,}: the page's header has no end") from error
            window *= 8


def _to_page(header: dict[int, Any], begin: int) -> Page:
    kind = header.get(1)
    details = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}
    values = header.get(details.get(kind, 0), {}) if isinstance(kind, int) else {}
    values = values if isinstance(values, dict) else {}
    sizes: list[Any] = [header.get(2), header.get(3), values.get(1, 0)]
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise pa.ArrowInvalid(f"at byte {begin:,}: the page's header has the sizes {sizes}")
    is_dictionary = kind == _DICTIONARY_PAGE
    encoding = values.get(4 if kind == _DATA_PAGE_V2 else 2)
    return Page(
        begin=begin,
        decoded_bytes=sizes[0],
        compressed_bytes=sizes[1],
        num_values=sizes[2],
        is_dictionary=is_dictionary,
        repeats_text=is_dictionary or encoding == _DELTA_BYTE_ARRAY,
    )


class _Thrift:
    """A reader of one struct in Thrift's compact protocol.

    It raises `IndexError` when `content` ends too early, and `pa.ArrowInvalid` for bytes that are no Thrift.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the struct's integers, booleans and structs by field number. Values of other types are None."""
        if depth > _MAX_DEPTH:
            raise pa.ArrowInvalid("the page's header has too many nested structs")
        fields: dict[int, Any] = {}
        number = 0
        while (byte := self._byte()) != 0:
            number = number + (byte >> 4) if byte >> 4 else self._zigzag()
            fields[number] = self._value(byte & 0x0F, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind in (_BYTE, _DOUBLE, _BINARY):
            self._skip({_BYTE: 1, _DOUBLE: 8}.get(kind) or self._varint())
            return None
        if kind in (_LIST, _SET):
            byte = self._byte()
            count = byte >> 4 if byte >> 4 < 15 else self._varint()
            for _ in range(count):
                # A boolean in a list has its own byte. A boolean in a field is in the field's type.
                self._skip(1) if byte & 0x0F in (_TRUE, _FALSE) else self._value(byte & 0x0F, depth + 1)
            return None
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        raise pa.ArrowInvalid(f"the page's header has a field of the unknown type {kind}")

    def _byte(self) -> int:
        byte = self.content[self.position]
        self.position += 1
        return byte

    def _skip(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > len(self.content):
            raise IndexError("behind the window")

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise pa.ArrowInvalid("the page's header has a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
