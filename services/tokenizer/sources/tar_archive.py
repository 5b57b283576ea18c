"""Reads a tar archive as a stream of members (POSIX pax and ustar, GNU's long names).

Python's `tarfile` is not used: it reads a name of any declared length into memory, recurses through extended headers
until the stack is full, keeps any number of holes of a sparse file, and takes a damaged header for the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from services.common.errors import ArtifactError

BLOCK_BYTES = 512
MAX_EXTENDED_HEADER_BYTES = 2**20
"""Bytes of the largest extended header that is read. Common ones hold a name, or a few kilobytes of attributes."""
MAX_PADDING_BYTES = 64 * 2**20
"""Bytes that may follow the mark of the end. Writers pad to records of 10 kB, and tapes had records of megabytes."""

_SKIPPED_BYTES = 2**20
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_CONTENT = (b"3", b"4", b"5", b"6")  # devices, folders, pipes
_PAX, _PAX_FOR_ALL, _LONG_NAME, _LONG_LINK, _SPARSE = (b"x", b"X"), b"g", b"L", b"K", b"S"
_LINKS = (b"1", b"2")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*")


@dataclass(frozen=True)
class Member:
    """A file in an archive, as its header describes it."""

    name: str
    size: int
    """Bytes of the content."""
    begin: int
    """Position of the content's first byte in the archive."""


class TarArchive:
    """A reader of members one after another. After `members` has yielded one, `readline` reads its content.

    Methods raise `ArtifactError`, with the position, for a header that is damaged or has no size, and for a sparse file
    or a link.
    """

    def __init__(self, file: BinaryIO, uri: str) -> None:
        self._file, self._uri = file, uri
        self._position = 0
        self._content_left = 0
        """Bytes of the current member's content that were not read yet."""
        self._padding = 0

    def members(self) -> Iterator[Member]:
        """Yield the files of the archive in order. The rest of a member that was not read is skipped."""
        for_all: dict[bytes, bytes] = {}
        while True:
            self._skip(self._content_left + self._padding)
            self._content_left = self._padding = 0
            header, extension = self._read_header(for_all)
            if header is None:
                return
            kind = header[156:157]
            size = self._size_of(header, extension)
            name = extension.get(b"path", _name_of(header)).decode("utf-8", "backslashreplace")
            if kind in _WITHOUT_CONTENT or (kind == b"\0" and name.endswith("/")):
                continue
            if kind in _LINKS:
                self._refuse(f"member {name[:200]!r} is a link, and an archive of text must not have one")
            if kind == _SPARSE or any(key.startswith(b"GNU.sparse.") for key in extension):
                self._refuse(f"member {name[:200]!r} is a sparse file, and an archive of text must not have one")
            if kind not in _REGULAR:
                self._refuse(f"member {name[:200]!r} is of the unknown kind {kind!r}")
            self._content_left, self._padding = size, -size % BLOCK_BYTES
            yield Member(name, size, self._position)

    def readline(self, max_bytes: int) -> bytes:
        """Read the rest of a line of the current member, up to `max_bytes`. Return b"" at the member's end."""
        line = self._file.readline(min(max_bytes, self._content_left))
        if not line and self._content_left:
            self._refuse("the archive ends within a member: it is cut off")
        self._position += len(line)
        self._content_left -= len(line)
        return line

    @property
    def position(self) -> int:
        """Number of bytes of the archive that were read."""
        return self._position

    def drain(self) -> None:
        """Read the padding behind the archive's end. Decompression checks a file's checksum only there."""
        begin = self._position
        while block := self._file.read(_SKIPPED_BYTES):
            self._position += len(block)
            if self._position - begin > MAX_PADDING_BYTES:
                self._refuse(f"more than {MAX_PADDING_BYTES:,} bytes follow the archive's end")

    def _read_header(self, for_all: dict[bytes, bytes]) -> tuple[bytes | None, dict[bytes, bytes]]:
        """Read a member's header, or None at the end, and the fields that extended headers set for it."""
        extension = dict(for_all)
        while True:
            begin = self._position
            header = self._read(BLOCK_BYTES, "a header")
            if not header.strip(b"\0"):
                return None, extension
            if not _has_its_checksum(header):
                self._refuse("the checksum of a member's header is wrong", begin)
            kind = header[156:157]
            if kind not in (*_PAX, _PAX_FOR_ALL, _LONG_NAME, _LONG_LINK):
                return header, extension
            size = self._size_of(header, {})
            if size > MAX_EXTENDED_HEADER_BYTES:
                self._refuse(
                    f"an extended header declares {size:,} bytes; the limit is {MAX_EXTENDED_HEADER_BYTES:,}", begin
                )
            content = self._read(size, "a header")
            self._skip(-size % BLOCK_BYTES)
            if kind == _LONG_NAME:
                extension[b"path"] = content.partition(b"\0")[0]
            elif kind in _PAX:
                extension |= self._parse_pax(content, begin)
            elif kind == _PAX_FOR_ALL:
                for_all |= self._parse_pax(content, begin)
                extension = for_all | extension

    def _parse_pax(self, content: bytes, begin: int) -> dict[bytes, bytes]:
        """Parse records `LENGTH KEY=VALUE\\n`, where LENGTH is the number of bytes of the whole record."""
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(content) and content[position]:
            digits = content[position : position + 20].partition(b" ")[0]
            length = int(digits) if _DECIMAL.fullmatch(digits) else 0
            record = content[position : position + length]
            key, equals, value = record[len(digits) + 1 :].partition(b"=")
            if len(record) != length or not (key and equals and value.endswith(b"\n")):
                self._refuse("a record of a pax header does not have its length", begin)
            records[key] = value[:-1]
            position += length
        return records

    def _size_of(self, header: bytes, extension: dict[bytes, bytes]) -> int:
        """Return the size of a member's content. Raises `ArtifactError` for a field that is no size."""
        if (text := extension.get(b"size")) is not None:
            if not _DECIMAL.fullmatch(text):
                self._refuse(f"the size of a member is {text[:40]!r}")
            return int(text)
        field = header[124:136]
        if field[0] & 0x80:  # GNU's format for large sizes: a number in base 256
            size = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
            if field[0] & 0x40 or size >= 2**63:
                self._refuse("the size of a member is negative, or has more than 63 bits")
            return size
        octal = _OCTAL.fullmatch(field.partition(b"\0")[0])
        if octal is None:
            self._refuse(f"the size of a member is {field!r}")
        return int(octal[1] or b"0", 8)

    def _read(self, num_bytes: int, what: str) -> bytes:
        content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            self._refuse(f"the archive ends within {what}, without the mark of its end: it is cut off")
        self._position += num_bytes
        return content

    def _skip(self, num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= len(self._read(min(num_bytes, _SKIPPED_BYTES), "a member"))

    def _refuse(self, what: str, position: int | None = None) -> NoReturn:
        at = self._position if position is None else position
        raise ArtifactError(f"{self._uri}: not a readable tar archive: at byte {at:,}: {what}.")


def _name_of(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _has_its_checksum(header: bytes) -> bool:
    octal = _OCTAL.fullmatch(header[148:156].partition(b"\0")[0])
    if octal is None:
        return False
    summed = header[:148] + b" " * 8 + header[156:]
    # Old writers added up signed bytes.
    return int(octal[1] or b"0", 8) in (sum(summed), sum(summed) - 256 * sum(byte > 127 for byte in summed))
