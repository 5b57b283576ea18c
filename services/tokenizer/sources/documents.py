"""The common interface of all sources: list the files, cut them into file ranges, and read documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources import arrow, dataset_rows, hub, jsonl, parquet, python_docs, text, wikicorpus
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.document_limit import explain_too_long
from services.tokenizer.sources.file_discovery import list_files
from services.tokenizer.sources.file_listing import FileListing
from services.tokenizer.sources.file_range import FileRange, Format, InputFile
from services.tokenizer.sources.file_version import require_unchanged
from services.tokenizer.sources.legibility import FEW_CHARACTERS, Legibility, is_utf8
from services.tokenizer.text_batch import TextBatch, join_small


@dataclass(frozen=True)
class DocumentFormat:
    """The functions that read one file format."""

    cut: Callable[[InputFile, int, int], list[FileRange]]
    """Cuts a file into file ranges of about `split_bytes`, in the file's order.

    The arguments are the file, `split_bytes` and `max_document_bytes`.
    """
    read: Callable[[FileRange, int, BadRows], Iterator[TextBatch]]
    """Reads the documents of a file range, in the file's order. They are UTF-8, unless the input is not.

    The arguments are the file range, `max_document_bytes`, and the bad rows, to which the reader adds those that it
    finds and goes on.
    """
    is_cut_by_size: bool = False
    """Whether `cut` opens no file."""
    locate: Callable[[FileRange, int], str] = text.locate
    """Returns a document's place for an error. The arguments are the file range and the document's number, from 0."""


FORMATS: dict[Format, DocumentFormat] = {
    "text": DocumentFormat(text.cut, text.read, is_cut_by_size=True),
    "jsonl": DocumentFormat(jsonl.cut, jsonl.read, locate=jsonl.locate),
    "parquet": DocumentFormat(parquet.cut, parquet.read, locate=parquet.locate),
    "arrow": DocumentFormat(arrow.cut, arrow.read, locate=arrow.locate),
    "rows": DocumentFormat(dataset_rows.cut, dataset_rows.read, is_cut_by_size=True, locate=dataset_rows.locate),
    "wikicorpus": DocumentFormat(wikicorpus.cut, wikicorpus.read),
    "python_module": DocumentFormat(python_docs.cut, python_docs.read_module, is_cut_by_size=True),
    "python_topics": DocumentFormat(python_docs.cut, python_docs.read_topics, is_cut_by_size=True),
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
        return hub.list_dataset(source)
    return list_files(source.model_copy(update={"uri": hub.with_revision(source.uri, source.revision)}))


def cut_file(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Cut a file into file ranges of about `split_bytes`, in the file's order.

    Raises `RecipeError` when the recipe does not fit the file, and `ArtifactError` when the file is damaged.
    """
    return FORMATS[file.format].cut(file, split_bytes, max_document_bytes)


def require_column(files: Sequence[InputFile], max_document_bytes: int) -> None:
    """Raise `RecipeError` when no one of the files of JSON has the source's key. Other formats check a schema in `cut`.

    A part of a data set may hold nulls alone, and then some writers leave the key out.
    """
    explanation = None
    for file in files:
        if file.format == "jsonl":
            missing = jsonl.explain_missing_key(file, max_document_bytes)
            if missing is None:
                return
            explanation = explanation or missing
    if explanation:
        raise RecipeError(explanation)


def read_documents(
    file_ranges: Iterable[FileRange],
    invalid_utf8: Literal["replace", "reject"],
    max_document_bytes: int,
    bad_rows: BadRows | None = None,
) -> Iterator[TextBatch]:
    """Read the documents of file ranges, in order, as valid UTF-8.

    Rows that are no documents are added to `bad_rows`, whose policy is "stop" when it is not given: they are those that
    a format's reader finds, documents of more than `max_document_bytes`, and under "reject" those that are not UTF-8.
    Raises `ArtifactError` for a file that is damaged, in another encoding, or has changed since it was listed.
    """
    return join_small(_read_file_ranges(file_ranges, invalid_utf8, max_document_bytes, bad_rows or BadRows()))


def _read_file_ranges(
    file_ranges: Iterable[FileRange],
    invalid_utf8: Literal["replace", "reject"],
    max_document_bytes: int,
    bad_rows: BadRows,
) -> Iterator[TextBatch]:
    for file_range in file_ranges:
        with require_unchanged(file_range.file):
            legibility, num_rows = Legibility(), 0
            for number, batch in _read_within_limit(file_range, max_document_bytes, bad_rows):
                num_rows += len(batch)
                if is_utf8(batch):
                    legibility.add(batch)
                    yield batch
                elif invalid_utf8 == "replace":
                    yield legibility.repair(batch)
                else:
                    valid = _drop_invalid(file_range, number, batch, bad_rows)
                    legibility.add(valid)
                    yield valid
            if legibility.is_bad(file_range.file.format):
                _require_legible(file_range.file, max_document_bytes)
                bad_rows.repaired.append(file_range.file.uri)
            if num_rows and not legibility.characters and file_range.file.format != "text":
                bad_rows.without_text.append(file_range.file.uri)


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
            size = int(batch.sizes[index])
            explain = partial(_explain_too_long, file_range, number + index, size, max_document_bytes)
            bad_rows.add("too long", file_range.file.uri, explain)
        yield number, batch if is_short.all() else TextBatch.of(batch.select(is_short).documents())
        number += len(batch)


def _drop_invalid(file_range: FileRange, number: int, batch: TextBatch, bad_rows: BadRows) -> TextBatch:
    """Return the documents in UTF-8. The others are bad rows."""
    valid = []
    for index, document in enumerate(batch.documents(), start=number):
        try:
            document.decode()
        except UnicodeDecodeError as error:
            bad_rows.add("not UTF-8", file_range.file.uri, partial(_explain_invalid, file_range, index, error))
        else:
            valid.append(document)
    return TextBatch.of(valid)


@lru_cache(maxsize=16)
def _require_legible(file: InputFile, max_document_bytes: int) -> None:
    """Raise `ArtifactError` for a file that is text in another encoding, or no text.

    The whole file is judged, which is read again for that: so no cut of the file changes the verdict.
    """
    legibility, bad_rows = Legibility(), BadRows("skip")
    for file_range in cut_file(file, max(1, file.bytes), max_document_bytes):
        for _, batch in _read_within_limit(file_range, max_document_bytes, bad_rows):
            legibility.add(batch) if is_utf8(batch) else legibility.repair(batch)
    if legibility.is_bad(file.format, FEW_CHARACTERS):
        raise ArtifactError(f"{file.uri}: {legibility.explain()}")


def _locate(file_range: FileRange, number: int) -> str:
    return FORMATS[file_range.file.format].locate(file_range, number)


def _explain_too_long(file_range: FileRange, number: int, num_bytes: int, max_document_bytes: int) -> str:
    return f"{_locate(file_range, number)}: {explain_too_long('the document', num_bytes, max_document_bytes)}"


def _explain_invalid(file_range: FileRange, number: int, error: UnicodeDecodeError) -> str:
    return (
        f"{_locate(file_range, number)} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start:,} "
        f'({error.reason}). Repair the file, or set corpus.invalid_utf8 = "replace".'
    )
