"""The common interface of all sources: list the files, cut them into file ranges, and read documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources import arrow, dataset_rows, hub, jsonl, parquet, python_docs, text, wikicorpus
from services.tokenizer.sources.bad_row import BadRow
from services.tokenizer.sources.document_limit import too_large
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
    read: Callable[[FileRange, int], Iterator[TextBatch]]
    """Reads the documents of a file range, in the file's order. They are UTF-8, unless the input is not.

    The arguments are the file range and `max_document_bytes`.
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
    file_ranges: Iterable[FileRange], invalid_utf8: Literal["replace", "reject"], max_document_bytes: int
) -> Iterator[TextBatch]:
    """Read the documents of file ranges, in order, as valid UTF-8.

    Raises `BadRow` for bytes that are not UTF-8 under "reject" and for a document above `max_document_bytes`, and
    `ArtifactError` for a file that is damaged, in another encoding, or has changed since it was listed.
    """
    return join_small(_read_file_ranges(file_ranges, invalid_utf8, max_document_bytes))


def _read_file_ranges(
    file_ranges: Iterable[FileRange], invalid_utf8: Literal["replace", "reject"], max_document_bytes: int
) -> Iterator[TextBatch]:
    for file_range in file_ranges:
        with require_unchanged(file_range.file):
            number, legibility = 0, Legibility()
            for batch in _read_within_limit(file_range, max_document_bytes):
                if is_utf8(batch):
                    legibility.add(batch)
                    yield batch
                elif invalid_utf8 == "replace":
                    yield legibility.repair(batch)
                else:
                    raise BadRow(_explain_invalid(file_range, number, batch))
                number += len(batch)
            if legibility.is_bad(file_range.file.format):
                _require_legible(file_range.file, max_document_bytes)


def _read_within_limit(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    number, file_format = 0, FORMATS[file_range.file.format]
    for batch in file_format.read(file_range, max_document_bytes):
        largest = int(np.argmax(batch.sizes)) if len(batch) else 0
        if len(batch) and batch.sizes[largest] > max_document_bytes:
            place = file_format.locate(file_range, number + largest)
            raise too_large(place, "the document", int(batch.sizes[largest]), max_document_bytes)
        yield batch
        number += len(batch)


@lru_cache(maxsize=16)
def _require_legible(file: InputFile, max_document_bytes: int) -> None:
    """Raise `ArtifactError` for a file that is text in another encoding, or no text.

    The whole file is judged, which is read again for that: so no cut of the file changes the verdict.
    """
    legibility = Legibility()
    for file_range in cut_file(file, max(1, file.bytes), max_document_bytes):
        for batch in _read_within_limit(file_range, max_document_bytes):
            legibility.add(batch) if is_utf8(batch) else legibility.repair(batch)
    if legibility.is_bad(file.format, FEW_CHARACTERS):
        raise ArtifactError(f"{file.uri}: {legibility.explain()}")


def _explain_invalid(file_range: FileRange, number: int, batch: TextBatch) -> str:
    for index, document in enumerate(batch.documents(), start=number):
        try:
            document.decode()
        except UnicodeDecodeError as error:
            return (
                f"{FORMATS[file_range.file.format].locate(file_range, index)} is not UTF-8: byte "
                f"0x{document[error.start]:02x} at {error.start:,} ({error.reason}). "
                f'Repair the file, or set corpus.invalid_utf8 = "replace".'
            )
    raise AssertionError("all documents of the batch are UTF-8")
