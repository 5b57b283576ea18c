"""Encodings of text from outside: a byte-order mark names one, and other bytes look like one."""

from __future__ import annotations

import codecs
import re

_ENCODING_OF_MARK = {  # UTF-32's little-endian mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_BINARY_FILES = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"%PDF": "PDF",
}
_LONE_HIGH_BYTE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
_ASCII = bytes(range(0x80))
_MULTIBYTE = ("Shift_JIS", "EUC-JP", "GB18030", "Big5", "EUC-KR")


def encoding_of_mark(content: bytes) -> str | None:
    """Return the codec of the byte-order mark that `content` begins with. The codec drops the mark."""
    return next((name for mark, name in _ENCODING_OF_MARK.items() if content.startswith(mark)), None)


def decode_text(content: bytes) -> str:
    """Decode UTF-8, or what the byte-order mark names, without the mark. Raises `UnicodeDecodeError`."""
    return content.decode(encoding_of_mark(content) or "utf-8")


def guess_encoding(sample: bytes) -> str:
    """Return what bytes that are no UTF-8 look like, for an error: a rough guess by the places of certain bytes."""
    binary = next((name for magic, name in _BINARY_FILES.items() if sample.startswith(magic)), None)
    if binary:
        return binary
    if b"\0" in sample:
        return _guess_wide(sample)
    high = sample.translate(None, _ASCII)
    if not high:
        return "binary data"
    if len(_LONE_HIGH_BYTE.findall(sample)) > len(high) / 2:  # accents between ASCII letters
        return "Latin-1 (Windows-1252)"
    multibyte = [name for name in _MULTIBYTE if _can_decode(sample, name)]
    if multibyte:
        return " or ".join(multibyte)
    letters = [byte for byte in high if byte >= 0xC0]
    if len(letters) > 0.8 * len(high):  # Cyrillic: lower case is above 0xE0 in one and below in the other
        return "Windows-1251" if sum(byte >= 0xE0 for byte in letters) > len(letters) / 2 else "KOI8-R"
    return "an encoding other than UTF-8, or binary data"


def _guess_wide(sample: bytes) -> str:
    """Name UTF-16 or UTF-32 by the places of NULs: the high bytes of ASCII letters, blanks and line ends."""
    zeros = [sample[place : len(sample) // 4 * 4 : 4].count(0) for place in range(4)]
    quarter = max(1, len(sample) // 4)
    if min(zeros[2:]) > 0.9 * quarter > zeros[0] or min(zeros[:2]) > 0.9 * quarter > zeros[3]:
        return "UTF-32" + ("LE" if zeros[3] > zeros[0] else "BE")
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    for is_likelier, name in ((odd > 2 * even, "UTF-16LE"), (even > 2 * odd, "UTF-16BE")):
        if is_likelier and _can_decode(sample, name):
            return name
    return "binary data"


def _can_decode(sample: bytes, encoding: str) -> bool:
    """Return whether a sample, which may end within a character, can be decoded."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return False
    return True
