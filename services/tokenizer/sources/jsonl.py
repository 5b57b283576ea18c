"""Reads JSON, where an object is a row and one of its keys holds the document.

A file has an object on each line, or is an array of objects or strings, or has objects that are indented.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice, pairwise
from typing import Any, BinaryIO

from services.common.input.text_encoding import guess_encoding
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.document_limit import explain_too_long, is_too_long, read_line, skip_line
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import is_compressed, open_file
from services.tokenizer.sources.json_values import BadValue, holds_lines, place_of_value, read_values
from services.tokenizer.sources.text_stream import TranscodedStream, open_text
from services.tokenizer.text_batch import TextBatch, in_batches

_EXPECTED = "A jsonl file holds a JSON object on each line, or is one array."
_SURROGATE_ESCAPED_IN_JSON = re.compile("[\ud800-\udfff]")
_ROWS_WITH_THE_KEY = 1_000
_WITHOUT_LIMIT = sys.maxsize // 2


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Cut a file into byte ranges of about `split_bytes`. A file range holds the lines that begin in it.

    Only lines of UTF-8 can be found from any byte, so a compressed file, an array and UTF-16 are one file range.
    """
    if is_compressed(file.uri) or file.bytes <= split_bytes or not _can_be_cut(file.uri):
        return [whole(file)]
    count = -(-file.bytes // split_bytes)
    borders = [index * file.bytes // count for index in range(count + 1)]
    return [FileRange(file, begin, end, end - begin) for begin, end in pairwise(borders)]


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the documents, whose bytes may be invalid UTF-8. A blank line is none.

    A row or key that is null, or a key that a row does not have, is an empty document: writers such as Spark leave out
    a null. A bad row is a line that is no JSON, a row that is no object or has no text, and more than
    `max_document_bytes` of either.
    """
    return in_batches(_read_documents(file_range, max_document_bytes, bad_rows))


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the line, or the element, from 1."""
    uri = file_range.file.uri
    with _open(file_range) as file:
        if not file_range.begin and not holds_lines(file):
            return place_of_value(uri, number)
        # These lines were read before, within the limit.
        position, _ = next(islice(_read_filled_lines(file, file_range, _WITHOUT_LIMIT), number, None))
    return _place(uri, position)


def explain_missing_key(file: InputFile, max_document_bytes: int) -> str | None:
    """Return the sentence for a file whose first rows do not have the key; None where one has it, or there is none."""
    keys: dict[str, None] = {}
    for _, row in islice(_read_rows(whole(file), max_document_bytes), _ROWS_WITH_THE_KEY):
        if isinstance(row, dict):  # others are bad rows, or null, where the documents are read
            if _has_key(row, file.column):
                return None
            keys |= dict.fromkeys(row)
    if not keys:
        return None
    return (
        f"{file.uri}: no row has the key {file.column!r}; its keys are {', '.join(keys)}. "
        f"Set `column` of this source to the key that holds the text; `a.b` is the key b in the object a."
    )


def _can_be_cut(uri: str) -> bool:
    with open_text(uri) as file:
        is_utf8 = not isinstance(file.raw, TranscodedStream)
        return is_utf8 and holds_lines(file)


def _read_documents(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[bytes]:
    uri, column = file_range.file.uri, file_range.file.column
    for locate_row, row in _read_rows(file_range, max_document_bytes):
        try:
            text = _text_of(row, column)
        except BadValue as error:
            bad_rows.add(error.reason, uri, partial(_explain, locate_row, error))
        else:
            yield _to_bytes(text)


def _explain(locate_row: Callable[[], str], error: BadValue) -> str:
    return f"{locate_row()}: {error}"


def _read_rows(file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[Callable[[], str], object]]:
    """Yield the rows, each with a function that returns its place. A row that cannot be parsed is a `BadValue`."""
    uri = file_range.file.uri
    with _open(file_range) as file:
        if not file_range.begin and not holds_lines(file):
            for number, value in enumerate(read_values(file, uri, max_document_bytes)):
                yield partial(place_of_value, uri, number), value
            return
        for position, line in _read_filled_lines(file, file_range, max_document_bytes):
            if line is None:
                what = f"the line (at byte {position:,})"
                row: object = BadValue("too long", explain_too_long(what, None, max_document_bytes))
            else:
                row = _parse(line)
            yield partial(_place, uri, position), row


def _open(file_range: FileRange) -> AbstractContextManager[io.BufferedReader[Any]]:
    # A file range that begins elsewhere is of lines in UTF-8.
    return (open_file if file_range.begin else open_text)(file_range.file.uri)


def _has_key(row: dict[str, object], column: str) -> bool:
    if column in row:
        return True
    first, dot, rest = column.partition(".")
    inner = row.get(first)
    return bool(dot) and isinstance(inner, dict) and _has_key(inner, rest)


def _text_of(row: object, column: str) -> str:
    """Return the text in a row. Raises `BadValue` for a row without text."""
    if isinstance(row, BadValue):
        raise row
    if row is None:
        return ""
    if isinstance(row, str) and column == "text":  # an array of strings has the column that `datasets` gives it
        return row
    if not isinstance(row, dict):
        raise BadValue("not an object", f"the row is a JSON {type(row).__name__}, expected an object with {column!r}.")
    return _find_text(row, column)


def _find_text(row: object, column: str) -> str:
    if row is None:
        return ""
    if not isinstance(row, dict):
        raise BadValue("not text", f"the object with {column!r} is {type(row).__name__}, expected an object.")
    value = row.get(column)
    if value is None and column not in row and "." in column:
        first, _, rest = column.partition(".")
        return _find_text(row.get(first), rest)
    if value is not None and not isinstance(value, str):
        raise BadValue("not text", f"{column!r} is {type(value).__name__}, expected a string.")
    return value or ""


def _read_filled_lines(
    file: BinaryIO, file_range: FileRange, max_document_bytes: int
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, with their positions in the file, without the marks of joined files.

    None is in the place of a line above the limit.
    """
    for position, line in _read_lines(file, file_range, max_document_bytes):
        unmarked = line and line.removeprefix(codecs.BOM_UTF8)
        if unmarked is None or (unmarked and not unmarked.isspace()):
            yield position, unmarked


def _read_lines(file: BinaryIO, file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    # The last file range ends with the file, not at `file.bytes`: a compressed file has more text than bytes, and a web
    # server may not tell a file's size.
    end = float("inf") if file_range.end == file_range.file.bytes else file_range.end
    position = 0
    if file_range.begin:
        position = file_range.begin - 1
        file.seek(position)
        # A line that begins in an earlier file range is that range's, however long it is.
        position += skip_line(file, end - position)
    while position < end and (line := read_line(file, max_document_bytes)):
        begin, position = position, position + len(line)
        if not is_too_long(line, max_document_bytes):
            yield begin, line
            continue
        yield begin, None
        if not line.endswith(b"\n"):
            position += skip_line(file, end - position)


def _parse(line: bytes) -> object:
    """Return the object on a line, None for null, or a `BadValue`."""
    try:
        # Bytes that are not UTF-8 become lone surrogates here. `corpus.invalid_utf8` decides about them later.
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        # Errors other than JSONDecodeError are for numbers of 5,000 digits and for 1,000 nested brackets.
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        return BadValue("not JSON", f"the line is not JSON: {reason}.{_guess(line)} {_EXPECTED}")
    if record is not None and not isinstance(record, dict):
        return BadValue("not an object", f"the line is a JSON {type(record).__name__}, expected an object. {_EXPECTED}")
    return record


def _guess(line: bytes) -> str:
    """Return a sentence about the encoding of a line that is no JSON, where it is not UTF-8."""
    try:
        is_text = "\0" not in line.decode()
    except UnicodeDecodeError:
        is_text = False
    return "" if is_text else f" The file looks like {guess_encoding(line)}, and not like UTF-8."


def _to_bytes(text: str) -> bytes:
    """Encode a JSON string. Its lone surrogates become bytes that are not UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        # UTF-8 has no bytes for an escape such as "\ud800". The byte 0xFF replaces it, which is never in UTF-8.
        escaped = _SURROGATE_ESCAPED_IN_JSON.sub(lambda match: _as_escaped_byte(match[0]), text)
        content = escaped.encode("utf-8", "surrogateescape")
        try:
            content.decode()
        except UnicodeDecodeError:
            return content
        # The escapes "\udcc3\udca9" gave two bytes that are a character in UTF-8. They become two bytes 0xFF.
        return _SURROGATE_ESCAPED_IN_JSON.sub("\udcff", text).encode("utf-8", "surrogateescape")


def _as_escaped_byte(surrogate: str) -> str:
    return surrogate if "\udc80" <= surrogate <= "\udcff" else "\udcff"


def _place(uri: str, position: int) -> str:
    """Return a line's place for an error: the file and the line's number, which is counted here."""
    with open_text(uri) as file:
        number, remaining = 1, position
        while remaining > 0 and (block := file.read(min(remaining, 2**20))):
            number += block.count(b"\n")
            remaining -= len(block)
    return f"{uri}:{number}"
