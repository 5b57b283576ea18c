"""Reads the original archive of wikicorpus, `raw.en.tgz` (Reese et al., LREC 2010; cs.upc.edu/~nlp/wikicorpus).

It is a gzipped tar archive of files in latin-1, in which an article is

    <doc id="12" title="Anarchism" nonfiltered="1" processed="1" dbindex="0">
    text
    ENDOFARTICLE.
    </doc>

The data set on the Hugging Face hub has the same articles, with a blank line after every line of text.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import IO, BinaryIO

from services.common.errors import ArtifactError
from services.tokenizer.sources.bad_rows import BadRow, BadRows
from services.tokenizer.sources.document_limit import explain_too_long
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.text_batch import TextBatch, in_batches

_BEGIN, _END, _MARK = b"<doc ", b"</doc>", b"ENDOFARTICLE."
_BLOCK_BYTES = 2**20


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return the whole archive. Raises `ArtifactError` when its first article cannot be read."""
    with suppress(BadRow):
        next(_read_articles(file.uri, max_document_bytes, BadRows()), None)
    return [whole(file)]


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the articles in the archive's order, without the line breaks around their text.

    An article of more than `max_document_bytes` is a bad row. Raises `ArtifactError` for a damaged archive.
    """
    return in_batches(_read_articles(file_range.file.uri, max_document_bytes, bad_rows))


def _read_articles(uri: str, max_document_bytes: int, bad_rows: BadRows) -> Iterator[bytes]:
    with open_file(uri) as opened:
        try:
            with tarfile.open(fileobj=opened, mode="r|") as archive:
                for member in archive:
                    if content := archive.extractfile(member) if member.isreg() else None:
                        yield from _parse(content, uri, f"{uri}: {member.name}", max_document_bytes, bad_rows)
                _require_end(archive.fileobj, uri)  # type: ignore[arg-type]
        except tarfile.TarError as error:
            raise ArtifactError(f"{uri}: not a readable tar archive: {error}.") from error


def _require_end(rest: BinaryIO, uri: str) -> None:
    """Read what follows the last member: zeros. Decompression checks a file's checksum only at the end.

    `tarfile` takes a damaged header for the end of the archive.
    """
    while block := rest.read(_BLOCK_BYTES):
        if block.strip(b"\0"):
            raise ArtifactError(f"{uri}: the tar archive has a damaged header, and members after it. Fetch it again.")


def _parse(content: IO[bytes], uri: str, place: str, max_document_bytes: int, bad_rows: BadRows) -> Iterator[bytes]:
    article: list[bytes] | None = None
    number = article_bytes = 0
    is_line_cut = False
    while line := content.readline(max_document_bytes + 1):
        is_rest_of_line, is_line_cut = is_line_cut, len(line) > max_document_bytes and not line.endswith(b"\n")
        number += not is_rest_of_line
        if is_rest_of_line and article is not None:
            continue  # of an article that is too long already
        if line.startswith(_BEGIN):
            if article is not None:
                raise ArtifactError(f"{place}:{number}: the article before this line has no {_END.decode()}.")
            article, article_bytes = [], 0
        elif article is not None and line.startswith(_END):
            if article_bytes <= max_document_bytes:
                yield b"".join(article).strip(b"\r\n").decode("latin-1").encode()
            article = None
        elif article is not None:
            if line.rstrip() != _MARK:
                was_too_long, article_bytes = article_bytes > max_document_bytes, article_bytes + len(line)
                if article_bytes <= max_document_bytes:
                    article.append(line)
                elif not was_too_long:
                    article.clear()
                    what = f"{place}:{number}: an article"
                    bad_rows.add("too long", uri, partial(explain_too_long, what, None, max_document_bytes))
        elif line.strip():
            raise ArtifactError(f"{place}:{number}: the line is outside of an article: {line[:60]!r}.")
    if article is not None:
        raise ArtifactError(f"{place}:{number}: the file ends within an article: the archive is cut off.")
