"""Reads JSON values that are longer than a line, one at a time: the elements of an array, or indented objects."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from services.common.errors import ArtifactError
from services.tokenizer.sources.document_limit import too_large

_BLOCK_CHARACTERS = 2**20
_LITERAL_CHARACTERS = len("-Infinity")
_BETWEEN_VALUES = re.compile(r"[\s,]*")


def holds_lines(file: io.BufferedReader[Any]) -> bool:
    """Return whether a file has a JSON object on each line, by the begin of the file, which is not consumed."""
    begin = file.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()
    first_line = begin.partition(b"\n")[0]
    return not first_line.startswith(b"[") and first_line.rstrip() != b"{"


def read_values(file: BinaryIO, uri: str, max_bytes: int) -> Iterator[object]:
    """Yield the elements of the array that a file holds, or the objects that follow one another in it.

    Bytes that are not UTF-8 become lone surrogates. Raises `ArtifactError` for what is no JSON, for an array without
    an end, and after more than `max_bytes` of one value.
    """
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    decoder = json.JSONDecoder()
    buffer = text.read(_BLOCK_CHARACTERS).removeprefix("\ufeff").lstrip()
    is_array = buffer.startswith("[")
    number, position = 0, int(is_array)
    while True:
        position = _BETWEEN_VALUES.match(buffer, position).end()  # type: ignore[union-attr]
        if position == len(buffer):
            buffer, position = text.read(_BLOCK_CHARACTERS), 0
            if not buffer:
                break
            continue
        if is_array and buffer[position] == "]":
            if (buffer[position + 1 :] + text.read(_BLOCK_CHARACTERS)).strip():
                raise ArtifactError(f"{uri}: text follows the end of the JSON array. Write one array, or JSON lines.")
            return
        try:
            value, position = decoder.raw_decode(buffer, position)
        except (ValueError, RecursionError) as error:  # also for numbers of 5,000 digits and 1,000 nested brackets
            place = place_of_value(uri, number)
            more = text.read(max(_BLOCK_CHARACTERS, len(buffer))) if _may_go_on(error, buffer) else ""
            if not more:
                raise ArtifactError(
                    f"{place} is not JSON: {getattr(error, 'msg', error)}. The file is damaged, or cut off."
                ) from error
            buffer, position = buffer[position:] + more, 0
            if len(buffer) - len(more) > max_bytes:
                raise too_large(place, "the value", None, max_bytes) from error
            continue
        yield value
        number += 1
    if is_array:
        raise ArtifactError(f"{uri}: the JSON array has no end after {number:,} elements: the file is cut off.")


def place_of_value(uri: str, number: int) -> str:
    """Return a value's place for an error. `number` counts from 0."""
    return f"{uri}: element {number + 1:,}"


def _may_go_on(error: Exception, buffer: str) -> bool:
    """Return whether more text could make the value whole: the parser has reached the end of the text that it has."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    is_at_end = error.pos >= len(buffer) - _LITERAL_CHARACTERS
    return is_at_end or error.msg.startswith("Unterminated string")
