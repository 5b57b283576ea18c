"""Enforces `corpus.max_document_bytes` while a file is read: a file without line ends is not read as one line."""

from __future__ import annotations

from typing import BinaryIO

from services.tokenizer.sources.bad_row import BadRow

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


def too_large(place: str, what: str, num_bytes: int | None, max_document_bytes: int) -> BadRow:
    """Return the error for a document above the limit. `num_bytes` is None when reading stopped at the limit."""
    size = f"{num_bytes:,} bytes" if num_bytes is not None else f"more than {max_document_bytes:,} bytes"
    return BadRow(
        f"{place}: {what} has {size}, and the limit for a document is "
        f"corpus.max_document_bytes = {max_document_bytes:,}. Check whether the file is damaged or has no line ends. "
        f"If it is correct, raise corpus.max_document_bytes."
    )
