"""The original wikicorpus archive, `raw.en.tgz` (Reese et al., LREC 2010; cs.upc.edu/~nlp/wikicorpus).

A gzipped tar of files in latin-1, in which an article is

    <doc id="12" title="Anarchism" nonfiltered="1" processed="1" dbindex="0">
    text
    ENDOFARTICLE.
    </doc>

The data set on the Hugging Face hub holds the same articles with a blank line after each line of text.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from services.common.errors import ArtifactError
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.text_batch import TextBatch, in_batches

_BLOCK_BYTES = 2**20
_BEGIN, _END, _MARK = b"<doc ", b"</doc>", b"ENDOFARTICLE."


def cut(file: InputFile, split_bytes: int) -> list[FileRange]:
    return [whole(file)]


def read(file_range: FileRange) -> Iterator[TextBatch]:
    """The text of each article, without the line breaks around it, in the archive's order."""
    return in_batches(_read_articles(file_range.file.uri))


def _read_articles(uri: str) -> Iterator[bytes]:
    with open_file(uri) as opened:
        try:
            with tarfile.open(fileobj=opened, mode="r|") as archive:
                for member in archive:
                    lines = archive.extractfile(member)
                    if lines is not None:
                        yield from _parse(lines, f"{uri}: {member.name}")
            while opened.read(_BLOCK_BYTES):  # behind the archive's end is gzip's checksum
                pass
        except tarfile.TarError as error:
            raise ArtifactError(
                f'{uri}: not a readable tar archive: {error}. format = "wikicorpus" reads the original raw.en.tgz.'
            ) from error


def _parse(lines: Iterator[bytes], place: str) -> Iterator[bytes]:
    article: list[bytes] | None = None
    number = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith(_BEGIN):
            if article is not None:
                raise ArtifactError(f"{place}:{number}: an article begins in another, which has no {_END.decode()}.")
            article = []
        elif article is not None and line.startswith(_END):
            yield b"".join(article).strip(b"\r\n").decode("latin-1").encode()
            article = None
        elif article is not None:
            if line.rstrip() != _MARK:
                article.append(line)
        elif line.strip():
            raise ArtifactError(f"{place}:{number}: text outside of an article: {line[:60]!r}.")
    if article is not None:
        raise ArtifactError(f"{place}:{number}: ends within an article: the archive is cut off.")
