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
from collections.abc import Iterable, Iterator

from services.common.errors import ArtifactError
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.sources.input_files import FileRange
from services.tokenizer.text_batch import TextBatch, in_batches

_START, _END, _MARK = b"<doc ", b"</doc>", b"ENDOFARTICLE."
_BLOCK_BYTES = 2**20


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the articles in the archive's order, without the line breaks around their text."""
    return in_batches(_read_articles(file_range.file.uri))


def _read_articles(uri: str) -> Iterator[bytes]:
    with open_file(uri) as opened:
        with tarfile.open(fileobj=opened, mode="r|") as archive:
            for member in archive:
                if content := archive.extractfile(member) if member.isfile() else None:
                    yield from _parse(content, f"{uri}: {member.name}")
        while opened.read(_BLOCK_BYTES):
            pass  # gzip checks its checksum at the end, and a damaged header looks to tarfile like the archive's end


def _parse(lines: Iterable[bytes], place: str) -> Iterator[bytes]:
    article: list[bytes] | None = None
    number = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith(_START) and article is None:
            article = []
        elif line.startswith(_END) and article is not None:
            yield b"".join(article).strip(b"\r\n").decode("latin-1").encode()
            article = None
        elif line.startswith(_START) or (article is None and line.strip()):
            raise ArtifactError(f"{place}:{number}: expected {_END.decode()} or a new article, got {line[:60]!r}.")
        elif article is not None and line.rstrip() != _MARK:
            article.append(line)
    if article is not None:
        raise ArtifactError(f"{place}:{number}: the file ends within an article: the archive is cut off.")
