"""Reads JSON, where an object is a row and one of its keys holds the document.

A file has an object on each line, or is an array of objects or strings, or has objects that are indented.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice, pairwise
from typing import Any, BinaryIO

from services.common.errors import ArtifactError, RecipeError
from services.tokenizer.sources.bad_rows import BadRows, BadValue, Locate, explain_too_long
from services.tokenizer.sources.file_system import encoding_of, is_compressed, open_file, open_text
from services.tokenizer.sources.input_files import FileRange, InputFile, whole_file
from services.tokenizer.text_batch import TextBatch, in_batches

_EXPECTED = "A jsonl file holds a JSON object on each line, or is one array."
_BETWEEN_VALUES = re.compile(r"[\s,]*")
_ESCAPED_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_ROWS_WITH_THE_KEY = 1_000
_BLOCK = 2**20
_LITERAL_CHARACTERS = len("-Infinity")
_NO_LIMIT = sys.maxsize // 2


def cut(file: InputFile, split_bytes: int) -> list[FileRange]:
    """Cut a file into byte ranges of about `split_bytes`, each of the lines that begin in it.

    Only lines of UTF-8 can be found from any byte, so a compressed file, an array and UTF-16 are one range.
    """
    if is_compressed(file.uri) or file.bytes <= split_bytes:
        return [whole_file(file)]
    with open_file(file.uri) as opened:
        if encoding_of(opened) not in (None, "utf-8-sig") or not _holds_lines(opened):
            return [whole_file(file)]
    count = -(-file.bytes // split_bytes)
    borders = [index * file.bytes // count for index in range(count + 1)]
    return [FileRange(file, begin, end, end - begin) for begin, end in pairwise(borders)]


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the documents, whose bytes may be invalid UTF-8. A blank line is none.

    A row or key that is null or missing is an empty document: writers such as Spark leave out a null.
    """
    file, rows = file_range.file, _read_rows(file_range, max_document_bytes)
    return in_batches(bad_rows.texts_of(file.uri, rows, lambda row: _to_bytes(_text_of(row, file.column))))


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the line, or the element, from 1."""
    uri = file_range.file.uri
    with _open(file_range) as file:
        if not file_range.begin and not _holds_lines(file):
            return _locate_element(uri, number)
        # These lines were read before, within the limit.
        position, _ = next(islice(_read_filled_lines(file, file_range, _NO_LIMIT), number, None))
    return _locate_line(uri, position)


def require_key(files: Iterable[InputFile], max_document_bytes: int) -> None:
    """Raise `RecipeError` when no one of the files of JSON has the source's key in its first rows.

    A part of a data set may hold nulls alone, and then some writers leave the key out.
    """
    keys: dict[str, None] = {}
    for file in files:
        if file.format != "jsonl":
            continue
        uri = file.uri
        for _, row in islice(_read_rows(whole_file(file), max_document_bytes), _ROWS_WITH_THE_KEY):
            if isinstance(row, dict):  # others are bad rows, or null, where the documents are read
                inner, key = _follow(row, file.column)
                if isinstance(inner, dict) and key in inner:
                    return
                keys |= dict.fromkeys(row)
    if keys:
        raise RecipeError(
            f"{uri}: no row has the key {file.column!r}; the keys are {', '.join(keys)}. "
            f"Set `column` of this source to the key that holds the text; `a.b` is the key b in the object a."
        )


def _holds_lines(file: io.BufferedReader[Any]) -> bool:
    """Return whether a file has a JSON object on each line, by its start, which is not consumed."""
    start = file.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()
    first_line = start.partition(b"\n")[0]
    return not first_line.startswith(b"[") and first_line.rstrip() != b"{"


def _read_rows(file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[Locate, object]]:
    """Yield the rows, each with a function that returns its place. A row that cannot be parsed is a `BadValue`."""
    uri = file_range.file.uri
    with _open(file_range) as file:
        if not file_range.begin and not _holds_lines(file):
            for number, value in enumerate(_read_values(file, uri)):
                yield partial(_locate_element, uri, number), value
            return
        for position, line in _read_filled_lines(file, file_range, max_document_bytes):
            if line is None:
                row: object = BadValue("too long", explain_too_long(None, max_document_bytes))
            else:
                row = _parse(line)
            yield partial(_locate_line, uri, position), row


def _open(file_range: FileRange) -> AbstractContextManager[io.BufferedReader[Any]]:
    # A file range that begins elsewhere is of lines in UTF-8.
    return (open_file if file_range.begin else open_text)(file_range.file.uri)


def _text_of(row: object, column: str) -> str:
    """Return the text in a row. Raises `BadValue` for a row without text."""
    if isinstance(row, BadValue):
        raise row
    if isinstance(row, str) and column == "text":  # an array of strings has the column that `datasets` gives it
        return row
    if row is not None and not isinstance(row, dict):
        raise BadValue("not an object", f"the row is a JSON {type(row).__name__}, expected an object with {column!r}.")
    inner, key = _follow(row, column)
    if inner is not None and not isinstance(inner, dict):
        raise BadValue("not text", f"the object with {key!r} is {type(inner).__name__}, expected an object.")
    value = inner.get(key) if inner else None
    if value is not None and not isinstance(value, str):
        raise BadValue("not text", f"{column!r} is {type(value).__name__}, expected a string.")
    return value or ""


def _follow(row: object, column: str) -> tuple[object, str]:
    """Return the object that has the column, and its key there: `a.b` may be the key b in the object a."""
    while isinstance(row, dict) and column not in row and "." in column:
        first, _, column = column.partition(".")
        row = row.get(first)
    return row, column


def _to_bytes(text: str) -> bytes:
    """Encode a JSON string. An escaped half of a surrogate pair becomes the byte 0xFF, which is never in UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _ESCAPED_SURROGATE.sub("\udcff", text).encode("utf-8", "surrogateescape")


def _read_filled_lines(
    file: BinaryIO, file_range: FileRange, max_document_bytes: int
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, with their positions in the file, without the marks of joined files.

    None is in the place of a line above the limit, which is not read into memory.
    """
    # The last file range ends with the file, not at `file.bytes`: a compressed file has more text than bytes, and a web
    # server may not tell a file's size.
    end = float("inf") if file_range.end == file_range.file.bytes else file_range.end
    position = 0
    if file_range.begin:
        position = file_range.begin - 1
        file.seek(position)
        position += _skip_line(file, end - position)  # it belongs to the range in which it begins
    while position < end and (line := file.readline(max_document_bytes + len(b"\r\n") + 1)):
        begin, position = position, position + len(line)
        if len(line.rstrip(b"\r\n")) > max_document_bytes:
            yield begin, None
            if not line.endswith(b"\n"):
                position += _skip_line(file, end - position)
            continue
        unmarked = line.removeprefix(codecs.BOM_UTF8)
        if unmarked and not unmarked.isspace():
            yield begin, unmarked


def _skip_line(file: BinaryIO, max_bytes: float) -> int:
    """Skip to the next line, or no fewer than `max_bytes` where none begins before, and return the bytes in between."""
    skipped = 0
    while skipped < max_bytes and (block := file.readline(_BLOCK)):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _parse(line: bytes) -> object:
    """Return the object on a line, None for null, or a `BadValue`."""
    try:
        # Bytes that are not UTF-8 become lone surrogates here. `corpus.invalid_utf8` decides about them later.
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        reason = str(error)  # of numbers of 5,000 digits and 1,000 nested brackets
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        return BadValue("not JSON", f"the line is not JSON: {reason}. {_EXPECTED}")
    if record is not None and not isinstance(record, dict):
        return BadValue("not an object", f"the line is a JSON {type(record).__name__}, expected an object. {_EXPECTED}")
    return record


def _locate_line(uri: str, position: int) -> str:
    """Return a line's place for an error: the file and the line's number, which is counted here."""
    with open_text(uri) as file:
        number, remaining = 1, position
        while remaining > 0 and (block := file.read(min(remaining, _BLOCK))):
            number += block.count(b"\n")
            remaining -= len(block)
    return f"{uri}:{number}"


def _read_values(file: BinaryIO, uri: str) -> Iterator[object]:
    """Yield the elements of the array that a file holds, or the objects that follow one another in it.

    Bytes that are not UTF-8 become lone surrogates. Raises `ArtifactError` for what is no JSON, behind which no value
    can be found, and for an array without an end.
    """
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    decoder = json.JSONDecoder()
    buffer = text.read(_BLOCK).removeprefix("\ufeff").lstrip()
    is_array = buffer.startswith("[")
    number, position = 0, int(is_array)
    while True:
        position = _BETWEEN_VALUES.match(buffer, position).end()  # type: ignore[union-attr]
        if position == len(buffer):
            buffer, position = text.read(_BLOCK), 0
            if not buffer:
                break
        elif is_array and buffer[position] == "]":
            if (buffer[position + 1 :] + text.read(_BLOCK)).strip():
                raise ArtifactError(f"{uri}: text follows the end of the JSON array. Write one array, or JSON lines.")
            return
        else:
            try:
                value, position = decoder.raw_decode(buffer, position)
            except (ValueError, RecursionError) as error:
                more = text.read(max(_BLOCK, len(buffer))) if _may_go_on(error, buffer) else ""
                if not more:
                    raise ArtifactError(
                        f"{_locate_element(uri, number)} is not JSON: {error}. The file is damaged, or cut off."
                    ) from error
                buffer, position = buffer[position:] + more, 0
            else:
                yield value
                number += 1
    if is_array:
        raise ArtifactError(f"{uri}: the JSON array has no end after {number:,} elements: the file is cut off.")


def _locate_element(uri: str, number: int) -> str:
    """Return a value's place for an error. `number` counts from 0."""
    return f"{uri}: element {number + 1:,}"


def _may_go_on(error: Exception, buffer: str) -> bool:
    """Return whether more text could make the value whole: the parser has reached the end of the text that it has."""
    return isinstance(error, json.JSONDecodeError) and (
        error.pos >= len(buffer) - _LITERAL_CHARACTERS or error.msg.startswith("Unterminated string")
    )
