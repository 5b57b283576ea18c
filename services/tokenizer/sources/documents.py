"""Every kind of source behind two questions: which files are there, and which documents are in this piece?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe import Source
from services.tokenizer.sources import jsonl, parquet, python_docs, text
from services.tokenizer.sources.file_system import list_files
from services.tokenizer.sources.piece import Format, InputFile, Piece


@dataclass(frozen=True)
class DocumentFormat:
    cut: Callable[[InputFile, int], list[Piece]]
    """Pieces of about so many bytes, in the file's order."""
    read: Callable[[Piece], Iterator[bytes]]
    """The documents of a piece, in the file's order, as UTF-8 unless the input is broken."""


FORMATS: dict[Format, DocumentFormat] = {
    "text": DocumentFormat(text.cut, text.read),
    "jsonl": DocumentFormat(jsonl.cut, jsonl.read),
    "parquet": DocumentFormat(parquet.cut, parquet.read),
    "python_module": DocumentFormat(python_docs.cut, python_docs.read_module),
    "python_topics": DocumentFormat(python_docs.cut, python_docs.read_topics),
}


class Document(NamedTuple):
    text: bytes
    """Valid UTF-8."""
    was_repaired: bool
    """U+FFFD stands where the input was not UTF-8."""


def list_inputs(source: Source) -> list[InputFile]:
    """The files of a source, in the order in which their documents enter the corpus."""
    if not source.uri.startswith(python_docs.URI):
        return list_files(source)
    if source.uri != python_docs.URI or source.format != "auto":
        raise RecipeError(f"{source.uri}: {python_docs.URI} takes no path and no format.")
    return python_docs.list_modules()


def cut_file(file: InputFile, split_bytes: int) -> list[Piece]:
    return FORMATS[file.format].cut(file, split_bytes)


def read_documents(pieces: Iterable[Piece], invalid_utf8: Literal["replace", "reject"]) -> Iterator[Document]:
    """The documents of some pieces, in order. Raises `ArtifactError` for what is not UTF-8 under "reject"."""
    for piece in pieces:
        for number, raw in enumerate(FORMATS[piece.file.format].read(piece)):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                if invalid_utf8 == "reject":
                    raise ArtifactError(_explain_invalid(piece, number, error)) from error
                yield Document(raw.decode("utf-8", "replace").encode(), was_repaired=True)
            else:
                yield Document(raw, was_repaired=False)


def _explain_invalid(piece: Piece, number: int, error: UnicodeDecodeError) -> str:
    part = "" if piece.begin == 0 else f" of the part from {piece.begin:,} on"
    return (
        f"{piece.file.uri}: document {number + 1:,}{part} is not UTF-8: byte 0x{error.object[error.start]:02x} at "
        f'{error.start:,} ({error.reason}). Repair it, or set corpus.invalid_utf8 = "replace".'
    )
