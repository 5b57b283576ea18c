"""JSON lines: a line is an object, and one of its keys holds the document."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice, pairwise

from services.common.errors import ArtifactError, RecipeError
from services.tokenizer.sources.document_limit import read_line, skip_line, too_large
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import is_compressed, open_file
from services.tokenizer.text_batch import TextBatch, in_batches

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_LEAST_BYTES_OF_VALUES = 2**20
_SURROGATE_ESCAPED_IN_JSON = re.compile("[\ud800-\udfff]")


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Byte ranges of about `split_bytes`: a file range holds the lines that begin in it.

    Raises `RecipeError` when the file's first line has no such key, `ArtifactError` when that is too long to be read.
    """
    _check_first_line(file, max_document_bytes)
    if is_compressed(file.uri) or file.bytes <= split_bytes:
        return [whole(file)]
    count = -(-file.bytes // split_bytes)
    borders = [index * file.bytes // count for index in range(count + 1)]
    return [FileRange(file, begin, end, end - begin) for begin, end in pairwise(borders)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Documents as UTF-8, or with the bytes that are not; `null` is an empty document, a blank line is none.

    Raises `ArtifactError` once more than `max_document_bytes` of a line were read: JSON is parsed line by line.
    """
    return in_batches(_read_documents(file_range, max_document_bytes))


def locate(file_range: FileRange, number: int) -> str:
    """The line of a document, from 1 on."""
    # Only of a line that was read before, within the limit of then.
    position, _ = next(islice(_read_filled_lines(file_range, sys.maxsize // 2), number, None))
    return _place(file_range.file.uri, position)


def _read_documents(file_range: FileRange, max_document_bytes: int) -> Iterator[bytes]:
    uri, column = file_range.file.uri, file_range.file.column
    for position, line in _read_filled_lines(file_range, max_document_bytes):
        _require_few_values(line, uri, position, max_document_bytes)
        yield _to_bytes(_parse(line, column, uri, position))


def _read_filled_lines(file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[int, bytes]]:
    lines = _read_lines(file_range, max_document_bytes)
    return ((position, line) for position, line in lines if not line.isspace())


def _read_lines(file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[int, bytes]]:
    # The last one ends where the file does: the size of a compressed file is not its text's, and a web server may not
    # know it.
    end = float("inf") if file_range.end == file_range.file.bytes else file_range.end
    with open_file(file_range.file.uri) as file:
        position = 0
        if file_range.begin:
            position = file_range.begin - 1
            file.seek(position)
            skipped = skip_line(file, max_document_bytes)
            if skipped is None:
                raise too_large(
                    f"{file_range.file.uri}: at byte {position:,}", "the line there", None, max_document_bytes
                )
            position += skipped
        while position < end and (line := read_line(file, max_document_bytes)) != b"":
            if line is None:
                place = f"{_place(file_range.file.uri, position)} (at byte {position:,})"
                raise too_large(place, "the line", None, max_document_bytes)
            yield position, line
            position += len(line)


def _require_few_values(line: bytes, uri: str, position: int, max_document_bytes: int) -> None:
    """Raise `ArtifactError` for a line whose values would take a multiple of its bytes: 64 for the 3 of `[],`."""
    most = max(_LEAST_BYTES_OF_VALUES, max_document_bytes // 8)
    if len(line) > most and (found := len(_STRING.sub(b"", line))) > most:
        raise ArtifactError(
            f"{_place(uri, position)} (at byte {position:,}): {found:,} bytes beside its strings, at most {most:,} are "
            f"read at corpus.max_document_bytes = {max_document_bytes:,}. Leave out what is no text, or raise that."
        )


def _parse(line: bytes, column: str, uri: str, position: int) -> str:
    record = _parse_object(line, uri, position)
    if column not in record:
        raise ArtifactError(f"{_place(uri, position)}: no key {column!r}; its keys are {', '.join(record) or 'none'}.")
    value = record[column]
    if value is not None and not isinstance(value, str):
        raise ArtifactError(f"{_place(uri, position)}: {column!r} is {type(value).__name__}, expected a string.")
    return value or ""


def _parse_object(line: bytes, uri: str, position: int) -> dict[str, object]:
    try:
        # Bytes that are not UTF-8 pass here, as lone surrogates: what becomes of them is the recipe's policy.
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        # What is no syntax error is a number of 5,000 digits, or 1,000 brackets.
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise ArtifactError(
            f"{_place(uri, position)}: not JSON: {reason}. A jsonl file holds one JSON object a line."
        ) from error
    if not isinstance(record, dict):
        raise ArtifactError(
            f"{_place(uri, position)}: a JSON {type(record).__name__}, expected an object. "
            f"A jsonl file holds one JSON object a line."
        )
    return record


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # "\ud800" in JSON is a character that UTF-8 cannot hold; the byte 0xFF stands for it, which UTF-8 never has.
        escaped = _SURROGATE_ESCAPED_IN_JSON.sub(lambda match: _as_escaped_byte(match[0]), text)
        content = escaped.encode("utf-8", "surrogateescape")
        try:
            content.decode()
        except UnicodeDecodeError:
            return content
        # "\udcc3\udca9" stood for two bytes that are a character together.
        return _SURROGATE_ESCAPED_IN_JSON.sub("\udcff", text).encode("utf-8", "surrogateescape")


def _as_escaped_byte(surrogate: str) -> str:
    return surrogate if "\udc80" <= surrogate <= "\udcff" else "\udcff"


def _check_first_line(file: InputFile, max_document_bytes: int) -> None:
    for position, line in _read_filled_lines(whole(file), max_document_bytes):
        record = _parse_object(line, file.uri, position)
        if file.column not in record:
            raise RecipeError(
                f"{file.uri}: its first line has no key {file.column!r}; its keys are {', '.join(record) or 'none'}. "
                f"Set `column` of this source to the one that holds the text."
            )
        return


def _place(uri: str, position: int) -> str:
    """The line's number, counted only now that somebody has to look at it."""
    with open_file(uri) as file:
        number, remaining = 1, position
        while remaining > 0 and (block := file.read(min(remaining, 2**20))):
            number += block.count(b"\n")
            remaining -= len(block)
    return f"{uri}:{number}"
