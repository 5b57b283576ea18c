"""The common interface of all sources: list the files, cut them into file ranges, and read documents."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources import columns, hub, jsonl, python_docs, wikicorpus
from services.tokenizer.sources.bad_rows import BadRows, explain_too_long
from services.tokenizer.sources.file_discovery import list_files
from services.tokenizer.sources.file_system import is_compressed, open_text, require_unchanged
from services.tokenizer.sources.input_files import FileListing, FileRange, Format, InputFile, whole_file
from services.tokenizer.text_batch import TextBatch, join_small

MAX_REPAIRED = 0.01
"""Share of a file's bytes that may be repaired. Text in Latin-1 has 2 % of accents, and other encodings more."""
FEW_REPAIRED = 10
"""Fewer repairs than these are a mishap in a file of any size."""
_BLOCK_BYTES = 2**20


def read_text(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read a file of plain text as one document. A file of more than `max_document_bytes` is a bad row."""
    uri, document = file_range.file.uri, bytearray()
    with open_text(uri) as file:
        while len(document) <= max_document_bytes and (block := file.read(_BLOCK_BYTES)):
            document += block
    if len(document) > max_document_bytes:
        bad_rows.add("too long", uri, lambda: uri, explain_too_long(None, max_document_bytes))
    else:
        yield TextBatch.of([bytes(document.removeprefix(codecs.BOM_UTF8))])


def _read_rows(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    from services.tokenizer.sources import dataset_rows  # noqa: PLC0415 - the import of `datasets` takes two seconds

    return dataset_rows.read(file_range, bad_rows)


def locate_document(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the number of the document, from 1."""
    return f"{file_range.file.uri}: document {number + 1:,}"


@dataclass(frozen=True)
class DocumentFormat:
    """The functions that read one file format."""

    read: Callable[[FileRange, int, BadRows], Iterator[TextBatch]]
    """Reads the documents of a file range in order, given `max_document_bytes` and where bad rows are counted."""
    cut: Callable[[InputFile, int], list[FileRange]] | None = None
    """Cuts a file into file ranges of about `split_bytes`, in the file's order; None where no file is cut."""
    locate: Callable[[FileRange, int], str] = locate_document
    """Returns the place of a document, by its number in the file range from 0, for an error."""


FORMATS: dict[Format, DocumentFormat] = {
    "text": DocumentFormat(read_text),
    "jsonl": DocumentFormat(jsonl.read, jsonl.cut, jsonl.locate),
    "parquet": DocumentFormat(columns.read_parquet, columns.cut_parquet, columns.locate_in_parquet),
    "arrow": DocumentFormat(columns.read_arrow, columns.cut_arrow, columns.locate_in_arrow),
    "rows": DocumentFormat(_read_rows, locate=columns.locate_row),
    "wikicorpus": DocumentFormat(wikicorpus.read),
    "python_module": DocumentFormat(python_docs.read_module),
    "python_topics": DocumentFormat(python_docs.read_topics),
}


def list_inputs(source: Source) -> FileListing:
    """List the files of a source, in the order in which their documents enter the corpus.

    No file is read, but the first rows of a data set whose builder takes the types of columns from them.
    """
    if source.uri.startswith(python_docs.URI):
        if source.uri != python_docs.URI or source.format != "auto":
            raise RecipeError(f"{source.uri}: a source {python_docs.URI} takes no path and no format.")
        return FileListing.of(python_docs.list_modules())
    if source.uri.startswith(hub.DATASETS):
        from services.tokenizer.sources import dataset_rows  # noqa: PLC0415 - as in `_read_rows`

        return dataset_rows.list_dataset(source)
    return list_files(source.model_copy(update={"uri": hub.with_revision(source.uri, source.revision)}))


def cut_file(file: InputFile, split_bytes: int) -> list[FileRange]:
    """Cut a file into file ranges of about `split_bytes`, in the file's order.

    Raises `RecipeError` for a file without the column, and `ArtifactError` for a damaged one.
    """
    cut = FORMATS[file.format].cut
    return cut(file, split_bytes) if cut else [whole_file(file)]


def read_documents(
    file_ranges: Iterable[FileRange],
    invalid_utf8: str,
    max_document_bytes: int,
    bad_rows: BadRows | None = None,
) -> Iterator[TextBatch]:
    """Read the documents of file ranges, in order, as valid UTF-8.

    `bad_rows`, by default with the policy "stop", gets the rows that a format's reader refuses, documents of more than
    `max_document_bytes`, and under "reject" those that are not UTF-8. Raises `ArtifactError` for a file that is
    damaged, in another encoding, or has changed since it was listed.
    """
    return join_small(_read_file_ranges(file_ranges, invalid_utf8, max_document_bytes, bad_rows or BadRows()))


def _read_file_ranges(
    file_ranges: Iterable[FileRange], invalid_utf8: str, max_document_bytes: int, bad_rows: BadRows
) -> Iterator[TextBatch]:
    for file_range in file_ranges:
        file = file_range.file
        num_rows = num_bytes = num_repairs = 0
        with require_unchanged(file):
            for number, batch in _read_within_limit(file_range, max_document_bytes, bad_rows):
                num_rows += len(batch)
                if invalid_utf8 == "replace":
                    valid, repairs = _repair(batch)
                    num_repairs += repairs
                else:
                    valid = batch if _is_utf8(batch) else _drop_invalid(file_range, number, batch, bad_rows)
                num_bytes += valid.text_bytes
                yield valid
            if num_repairs > MAX_REPAIRED * num_bytes:
                _require_utf8(file, max_document_bytes)
        if num_rows and not num_bytes and file.format != "text":
            bad_rows.without_text.append(file.uri)


@lru_cache(maxsize=16)
def _require_utf8(file: InputFile, max_document_bytes: int) -> None:
    """Raise `ArtifactError` for a file in another encoding.

    The whole file is judged, which is read again for that: so no cut of the file changes the verdict.
    """
    num_bytes = num_repairs = 0
    for file_range in cut_file(file, max(1, file.bytes)):
        for _, batch in _read_within_limit(file_range, max_document_bytes, BadRows("skip")):
            valid, repairs = _repair(batch)
            num_bytes, num_repairs = num_bytes + valid.text_bytes, num_repairs + repairs
    if num_repairs >= FEW_REPAIRED and num_repairs > MAX_REPAIRED * num_bytes:
        advice = "Write its text again as UTF-8"
        if file.format in ("text", "jsonl"):
            unpacked = "its unpacked text" if is_compressed(file.uri) else "it"
            advice = f"Name a copy: convert {unpacked} with `iconv -f ENCODING -t UTF-8 FILE > COPY`"
        raise ArtifactError(
            f"{file.uri}: {num_repairs:,} of {num_bytes:,} bytes are not UTF-8, expected at most {MAX_REPAIRED:.0%}. "
            f"{advice}, or remove it from corpus.sources."
        )


def _read_within_limit(
    file_range: FileRange, max_document_bytes: int, bad_rows: BadRows
) -> Iterator[tuple[int, TextBatch]]:
    """Yield the documents within the limit, each batch with the number of documents of the file range before it.

    The number is right as long as the file has no bad row, and the place of the first one alone is asked for.
    """
    number = 0
    for batch in FORMATS[file_range.file.format].read(file_range, max_document_bytes, bad_rows):
        is_short = batch.sizes <= max_document_bytes
        for index in np.flatnonzero(~is_short).tolist():
            problem = explain_too_long(int(batch.sizes[index]), max_document_bytes)
            bad_rows.add("too long", file_range.file.uri, partial(_locate, file_range, number + index), problem)
        yield number, batch if is_short.all() else TextBatch.of(batch.select(is_short).documents())
        number += len(batch)


def _is_utf8(batch: TextBatch) -> bool:
    """Return whether all documents are UTF-8. Arrow checks 15 GB a second."""
    offsets = np.append(batch.begins, batch.ends[-1:])
    if not np.array_equal(offsets[1:], batch.ends):
        raise ValueError("the documents of a batch must be adjacent in its text")
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(batch.text)]
    try:
        pa.Array.from_buffers(pa.large_binary(), len(batch), buffers).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def _repair(batch: TextBatch) -> tuple[TextBatch, int]:
    """Return the documents with U+FFFD for what is not UTF-8, and how often it was put.

    Readers write 0xFF for half of a surrogate pair in JSON or UTF-16, which tells no other encoding and is not counted.
    """
    if _is_utf8(batch):
        return batch, 0
    broken = batch.documents()
    repaired = [document.decode("utf-8", "replace").encode() for document in broken]
    changed = [(before, after) for before, after in zip(broken, repaired, strict=True) if before != after]
    mark = "\ufffd".encode()
    repairs = sum(after.count(mark) - before.count(mark) - before.count(b"\xff") for before, after in changed)
    return TextBatch.of(repaired, len(changed)), repairs


def _drop_invalid(file_range: FileRange, number: int, batch: TextBatch, bad_rows: BadRows) -> TextBatch:
    """Return the documents in UTF-8. The others are bad rows."""
    valid = []
    for index, document in enumerate(batch.documents(), start=number):
        try:
            document.decode()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{document[error.start]:02x} at {error.start:,} ({error.reason})"
            problem = f'not UTF-8: {byte}. Repair the file, or set corpus.invalid_utf8 = "replace".'
            bad_rows.add("not UTF-8", file_range.file.uri, partial(_locate, file_range, index), problem)
        else:
            valid.append(document)
    return TextBatch.of(valid)


def _locate(file_range: FileRange, number: int) -> str:
    return FORMATS[file_range.file.format].locate(file_range, number)
