"""Reads text as UTF-8 from the encoding that its byte-order mark names."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from services.common.input.text_encoding import encoding_of_mark
from services.tokenizer.sources.file_system import open_file

_BLOCK_BYTES = 2**20
_NEVER_IN_UTF8 = "\udcff"


class TranscodedStream(io.RawIOBase):
    """UTF-8 of a stream in another encoding. A part that has no character becomes one byte 0xFF, never in UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("millrace.invalid")
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        is_end = False
        while not self._ready and not is_end:
            block = self._file.read(_BLOCK_BYTES)
            is_end = not block
            self._ready = memoryview(self._decoder.decode(block, final=is_end).encode("utf-8", "surrogateescape"))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _mark_invalid(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _NEVER_IN_UTF8, error.end


codecs.register_error("millrace.invalid", _mark_invalid)


@contextmanager
def open_text(uri: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file of text as UTF-8: with a byte-order mark of UTF-16 or UTF-32 it is decoded, without the mark.

    A mark of UTF-8 is left to the reader, and so are bytes that are no UTF-8.
    """
    with open_file(uri) as file:
        encoding = encoding_of_mark(file.peek(4)[:4])
        is_utf8 = encoding in (None, "utf-8-sig")
        yield file if is_utf8 else io.BufferedReader(TranscodedStream(file, str(encoding)), _BLOCK_BYTES)
