"""Reads JSON lines, where each line is an object and one of its keys holds the document."""

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
    """Cut a file into byte ranges of about `split_bytes`. A file range holds the lines that begin in it.

    Raises `RecipeError` when the first line lacks the key, and `ArtifactError` when it is above the limit.
    """
    _check_first_line(file, max_document_bytes)
    if is_compressed(file.uri) or file.bytes <= split_bytes:
        return [whole(file)]
    count = -(-file.bytes // split_bytes)
    borders = [index * file.bytes // count for index in range(count + 1)]
    return [FileRange(file, begin, end, end - begin) for begin, end in pairwise(borders)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Read the documents, whose bytes may be invalid UTF-8. `null` is an empty document, and a blank line is none.

    Raises `ArtifactError` after more than `max_document_bytes` of a line, because JSON is parsed line by line.
    """
    return in_batches(_read_documents(file_range, max_document_bytes))


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the line, from 1."""
    # These lines were read before, within the limit.
    position, _ = next(islice(_read_filled_lines(file_range, sys.maxsize // 2), number, None))
    return _place(file_range.file.uri, position)


def _read_documents(file_range: FileRange, max_document_bytes: int) -> Iterator[bytes]:
    uri, column = file_range.file.uri, file_range.file.column
    for position, line in _read_filled_lines(file_range, max_document_bytes):
        _require_few_values(line, uri, position, max_document_bytes)
        yield _to_bytes(_parse(line, column, uri, position))


def _read_filled_lines(file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their positions in the file."""
    lines = _read_lines(file_range, max_document_bytes)
    return ((position, line) for position, line in lines if not line.isspace())


def _read_lines(file_range: FileRange, max_document_bytes: int) -> Iterator[tuple[int, bytes]]:
    # The last file range ends with the file, not at `file.bytes`: a compressed file has more text than bytes, and a web
    # server may not tell a file's size.
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
    """Raise `ArtifactError` for a line whose parsed values would need a multiple of its bytes: `[],` needs 64."""
    most = max(_LEAST_BYTES_OF_VALUES, max_document_bytes // 8)
    if len(line) > most and (found := len(_STRING.sub(b"", line))) > most:
        raise ArtifactError(
            f"{_place(uri, position)} (at byte {position:,}): the line has {found:,} bytes outside of its strings. "
            f"The limit is {most:,} with corpus.max_document_bytes = {max_document_bytes:,}. Remove keys that hold no "
            f"text, or raise corpus.max_document_bytes."
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
        # Bytes that are not UTF-8 become lone surrogates here. `corpus.invalid_utf8` decides about them later.
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        # Errors other than JSONDecodeError are for numbers of 5,000 digits and for 1,000 nested brackets.
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise ArtifactError(
            f"{_place(uri, position)}: the line is not JSON: {reason}. A jsonl file holds a JSON object on each line."
        ) from error
    if not isinstance(record, dict):
        raise ArtifactError(
            f"{_place(uri, position)}: the line is a JSON {type(record).__name__}, expected an object. "
            f"A jsonl file holds a JSON object on each line."
        )
    return record


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


def _check_first_line(file: InputFile, max_document_bytes: int) -> None:
    for position, line in _read_filled_lines(whole(file), max_document_bytes):
        record = _parse_object(line, file.uri, position)
        if file.column not in record:
            raise RecipeError(
                f"{file.uri}: the first line has no key {file.column!r}; its keys are {', '.join(record) or 'none'}. "
                f"Set `column` of this source to the key that holds the text."
            )
        return


def _place(uri: str, position: int) -> str:
    """Return a line's place for an error: the file and the line's number, which is counted here."""
    with open_file(uri) as file:
        number, remaining = 1, position
        while remaining > 0 and (block := file.read(min(remaining, 2**20))):
            number += block.count(b"\n")
            remaining -= len(block)
    return f"{uri}:{number}"
