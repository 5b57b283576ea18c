"""Encodings of text files by their byte-order marks."""

from __future__ import annotations

import codecs

_ENCODING_OF_MARK = {  # UTF-32's little-endian mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def encoding_of_mark(content: bytes) -> str | None:
    """Return the codec of the byte-order mark that `content` begins with. The codec drops the mark."""
    return next((name for mark, name in _ENCODING_OF_MARK.items() if content.startswith(mark)), None)
