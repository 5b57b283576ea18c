"""Decompresses streams that follow one another in a file, with zeros between and after them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

_BLOCK_BYTES = 2**17


class ConcatenatedStreams(io.RawIOBase):
    """What the streams of a file hold, one after another, as `pbzip2` and `xz` write them.

    Zeros after a stream are padding, as tapes and tar have it. Raises `EOFError` for a file that is cut off, and the
    decompressor's error for other bytes after a stream: the modules `bz2` and `lzma` would drop them without a word.
    """

    def __init__(self, file: BinaryIO, new_decompressor: Callable[[], Any]) -> None:
        self._file, self._new_decompressor = file, new_decompressor
        self._decompressor = new_decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            block = b""
            if self._decompressor.eof:
                block = self._decompressor.unused_data.lstrip(b"\0")
                while not block:
                    read = self._file.read(_BLOCK_BYTES)
                    if not read:
                        return 0
                    block = read.lstrip(b"\0")
                self._decompressor = self._new_decompressor()
            elif self._decompressor.needs_input:
                block = self._file.read(_BLOCK_BYTES)
                if not block:
                    raise EOFError("the compressed file ends within a stream: it is cut off")
            content = self._decompressor.decompress(block, len(buffer))
            if content:
                buffer[: len(content)] = content
                return len(content)
