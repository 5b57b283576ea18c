"""Enforces `corpus.max_document_bytes` while a file is read.

A sparse archive can declare a terabyte, and a few kilobytes of gzip can decompress to gigabytes without a line end. So
reading stops with an error as soon as a document, a line, an article, a page or a record batch is too large.
"""

from __future__ import annotations

from typing import BinaryIO

from services.common.errors import ArtifactError

_DOCUMENTS_AT_ONCE = 8
_LEAST_AT_ONCE = 64 * 2**20
_BLOCK_BYTES = 2**20


def read_document(file: BinaryIO, place: str, what: str, max_document_bytes: int) -> bytes:
    """Read the rest of a file, which is one document. `what` names the document in an error.

    Raises `ArtifactError` when it has more than `max_document_bytes`.
    """
    blocks: list[bytes] = []
    room = max_document_bytes
    # One read of `max_document_bytes` would allocate that much memory for every small file.
    while block := file.read(min(_BLOCK_BYTES, room + 1)):
        blocks.append(block)
        room -= len(block)
        if room < 0:
            raise too_large(place, what, None, max_document_bytes)
    return b"".join(blocks)


def read_line(file: BinaryIO, max_document_bytes: int) -> bytes | None:
    """Read a line with its line end. Return b"" at the end of the file, and None for a line above the limit."""
    line = file.readline(max_document_bytes + len(b"\r\n") + 1)
    return None if len(line.rstrip(b"\r\n")) > max_document_bytes else line


def skip_line(file: BinaryIO, max_document_bytes: int) -> int | None:
    """Skip to the begin of the next line, and return the bytes in between, or None when they are above the limit."""
    skipped = 0
    while block := file.readline(_BLOCK_BYTES):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
        if skipped > max_document_bytes:
            return None
    return skipped


def bytes_at_once(max_document_bytes: int) -> int:
    """Return the limit for a Parquet page or an Arrow record batch, which is decoded with all of its documents.

    It is 1 GiB at the default of `max_document_bytes`. Common writers make pages and batches of 1 to 100 MiB.
    """
    return max(_DOCUMENTS_AT_ONCE * max_document_bytes, _LEAST_AT_ONCE)


def require_at_most_at_once(place: str, what: str, num_bytes: int, max_document_bytes: int) -> None:
    """Raise `ArtifactError` for a page or a record batch above `bytes_at_once`."""
    most = bytes_at_once(max_document_bytes)
    if num_bytes > most:
        raise ArtifactError(
            f"{place}: {what} has {num_bytes:,} bytes and is decoded as a whole. The limit is {most:,} bytes with "
            f"corpus.max_document_bytes = {max_document_bytes:,}. Write the file again with smaller row groups or "
            f"record batches, or raise corpus.max_document_bytes to {-(-num_bytes // _DOCUMENTS_AT_ONCE):,}."
        )


def too_large(place: str, what: str, num_bytes: int | None, max_document_bytes: int) -> ArtifactError:
    """Return the error for a document above the limit. `num_bytes` is None when reading stopped at the limit."""
    size = f"{num_bytes:,} bytes" if num_bytes is not None else f"more than {max_document_bytes:,} bytes"
    return ArtifactError(
        f"{place}: {what} has {size}, and the limit for a document is "
        f"corpus.max_document_bytes = {max_document_bytes:,}. Check whether the file is damaged or has no line ends. "
        f"If it is correct, raise corpus.max_document_bytes."
    )
