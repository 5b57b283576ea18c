"""The largest document that is read, `corpus.max_document_bytes`, kept while a file is read and not only afterwards.

What a file claims of itself costs nothing to claim: a sparse archive may declare a terabyte, and a few kilobytes of
gzip unfold to gigabytes without a line end. Whatever holds the document is refused once that much of it was read.
"""

from __future__ import annotations

from typing import BinaryIO

from services.common.errors import ArtifactError

_DOCUMENTS_AT_ONCE = 8
_LEAST_AT_ONCE = 64 * 2**20
_BLOCK_BYTES = 2**20


def read_document(file: BinaryIO, place: str, what: str, max_document_bytes: int) -> bytes:
    """All that is left of a file, which is one document: `what` names it.

    Raises `ArtifactError` for more than `max_document_bytes`.
    """
    blocks: list[bytes] = []
    room = max_document_bytes
    # Not one read of all that is allowed: it would take that much memory for each small file.
    while block := file.read(min(_BLOCK_BYTES, room + 1)):
        blocks.append(block)
        room -= len(block)
        if room < 0:
            raise too_large(place, what, None, max_document_bytes)
    return b"".join(blocks)


def read_line(file: BinaryIO, max_document_bytes: int) -> bytes | None:
    """The next line with its end, b"" behind the last one, and None for one of more than `max_document_bytes`."""
    line = file.readline(max_document_bytes + len(b"\r\n") + 1)
    return None if len(line.rstrip(b"\r\n")) > max_document_bytes else line


def skip_line(file: BinaryIO, max_document_bytes: int) -> int | None:
    """The bytes up to the next line's begin, and None where that is more than `max_document_bytes` away."""
    skipped = 0
    while block := file.readline(_BLOCK_BYTES):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
        if skipped > max_document_bytes:
            return None
    return skipped


def bytes_at_once(max_document_bytes: int) -> int:
    """Bytes that a page of parquet, or a record batch of arrow, may have: it is decoded with all of its documents.

    At the default of `max_document_bytes` that is 1 GiB. Writers make them of 1 to 100 MiB.
    """
    return max(_DOCUMENTS_AT_ONCE * max_document_bytes, _LEAST_AT_ONCE)


def require_at_most_at_once(place: str, what: str, num_bytes: int, max_document_bytes: int) -> None:
    """Raise `ArtifactError` for a page or a record batch that would take too much memory to decode."""
    most = bytes_at_once(max_document_bytes)
    if num_bytes > most:
        raise ArtifactError(
            f"{place}: {what} has {num_bytes:,} bytes, and is decoded as a whole: at most {most:,} are at "
            f"corpus.max_document_bytes = {max_document_bytes:,}. Write the file anew in smaller pieces, or raise "
            f"corpus.max_document_bytes to {-(-num_bytes // _DOCUMENTS_AT_ONCE):,} where memory allows."
        )


def too_large(place: str, what: str, num_bytes: int | None, max_document_bytes: int) -> ArtifactError:
    """The error for a document, or a line that holds one, whose size is only known where it was read to its end."""
    size = f"{num_bytes:,} bytes" if num_bytes is not None else f"more than {max_document_bytes:,} bytes"
    return ArtifactError(
        f"{place}: {what} has {size}, and the largest document that is read has "
        f"corpus.max_document_bytes = {max_document_bytes:,}. Look whether the file is damaged, or lacks its line "
        f"ends; raise corpus.max_document_bytes where it is right."
    )
