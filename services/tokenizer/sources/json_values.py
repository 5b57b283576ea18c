"""Reads JSON values that are longer than a line, one at a time: the elements of an array, or indented objects."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from services.common.artifacts.corpus import BadRowReason
from services.common.errors import ArtifactError
from services.tokenizer.sources.document_limit import explain_too_long

_BLOCK_CHARACTERS = 2**20
_LITERAL_CHARACTERS = len("-Infinity")
_BETWEEN_VALUES = re.compile(r"[\s,]*")
_MARK_WITHIN_VALUE = re.compile(r"\\.|[\"\[\]{}]", re.DOTALL)


class BadValue(Exception):
    """A JSON value, or what a line holds instead, that is no document. Its text is the sentence for an error."""

    def __init__(self, reason: BadRowReason, explanation: str) -> None:
        super().__init__(explanation)
        self.reason: BadRowReason = reason


def holds_lines(file: io.BufferedReader[Any]) -> bool:
    """Return whether a file has a JSON object on each line, by the begin of the file, which is not consumed."""
    begin = file.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()
    first_line = begin.partition(b"\n")[0]
    return not first_line.startswith(b"[") and first_line.rstrip() != b"{"


def read_values(file: BinaryIO, uri: str, max_bytes: int) -> Iterator[object]:
    """Yield the elements of the array that a file holds, or the objects that follow one another in it.

    Bytes that are not UTF-8 become lone surrogates. A value of more than `max_bytes` is skipped, and a `BadValue` comes
    in its place. Raises `ArtifactError` for what is no JSON, behind which no value can be found, and for an array
    without an end.
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
            value, end = decoder.raw_decode(buffer, position)
        except (ValueError, RecursionError) as error:  # also for numbers of 5,000 digits and 1,000 nested brackets
            more = text.read(max(_BLOCK_CHARACTERS, len(buffer))) if _may_go_on(error, buffer) else ""
            if not more:
                raise ArtifactError(
                    f"{place_of_value(uri, number)} is not JSON: {getattr(error, 'msg', error)}. "
                    f"The file is damaged, or cut off."
                ) from error
            buffer, position = buffer[position:] + more, 0
            if len(buffer) - len(more) <= max_bytes:
                continue
            buffer, position = _skip_value(text, buffer, place_of_value(uri, number))
            value = BadValue("too long", explain_too_long("the value", None, max_bytes))
        else:
            if end - position > max_bytes:
                value = BadValue("too long", explain_too_long("the value", None, max_bytes))
            position = end
        yield value
        number += 1
    if is_array:
        raise ArtifactError(f"{uri}: the JSON array has no end after {number:,} elements: the file is cut off.")


def place_of_value(uri: str, number: int) -> str:
    """Return a value's place for an error. `number` counts from 0."""
    return f"{uri}: element {number + 1:,}"


def _skip_value(text: io.TextIOBase, buffer: str, place: str) -> tuple[str, int]:
    """Read to the end of the string, array or object that `buffer` begins with, and return what follows, as read."""
    depth, in_string = 0, False
    while True:
        read = 0
        for match in _MARK_WITHIN_VALUE.finditer(buffer):
            read, mark = match.end(), match[0]
            if mark == '"':
                in_string = not in_string
            elif not in_string:
                depth += (mark in "[{") - (mark in "]}")
            if mark[0] != "\\" and not in_string and not depth:
                return buffer, read
        more = text.read(_BLOCK_CHARACTERS)
        if not more:
            raise ArtifactError(f"{place} has no end. The file is damaged, or cut off.")
        # A backslash at the end escapes a character of the next block.
        buffer = ("\\" if buffer.endswith("\\") and read < len(buffer) else "") + more


def _may_go_on(error: Exception, buffer: str) -> bool:
    """Return whether more text could make the value whole: the parser has reached the end of the text that it has."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    is_at_end = error.pos >= len(buffer) - _LITERAL_CHARACTERS
    return is_at_end or error.msg.startswith("Unterminated string")
