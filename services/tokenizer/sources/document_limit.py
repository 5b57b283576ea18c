"""Enforces `corpus.max_document_bytes` while a file is read: a file without line ends is not read as one line."""

from __future__ import annotations

from typing import BinaryIO

_BLOCK_BYTES = 2**20


def read_document(file: BinaryIO, max_document_bytes: int) -> bytes | None:
    """Read the rest of a file, which is one document; None when it has more than `max_document_bytes`."""
    blocks: list[bytes] = []
    room = max_document_bytes
    # One read of `max_document_bytes` would allocate that much memory for every small file.
    while block := file.read(min(_BLOCK_BYTES, room + 1)):
        blocks.append(block)
        room -= len(block)
        if room < 0:
            return None
    return b"".join(blocks)


def read_line(file: BinaryIO, max_document_bytes: int) -> bytes:
    """Read a line with its line end, or as much of it as shows that it is above the limit: see `is_too_long`."""
    return file.readline(max_document_bytes + len(b"\r\n") + 1)


def is_too_long(line: bytes, max_document_bytes: int) -> bool:
    """Return whether `read_line` has returned a line that is above the limit, or the first part of one."""
    return len(line.rstrip(b"\r\n")) > max_document_bytes


def skip_line(file: BinaryIO, max_bytes: float) -> int:
    """Skip to the next line, or no fewer than `max_bytes` where none begins before, and return the bytes in between."""
    skipped = 0
    while skipped < max_bytes and (block := file.readline(_BLOCK_BYTES)):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def explain_too_long(what: str, num_bytes: int | None, max_document_bytes: int) -> str:
    """Return the sentence for what is above the limit. `num_bytes` is None when reading stopped at the limit."""
    size = f"{num_bytes:,} bytes" if num_bytes is not None else f"more than {max_document_bytes:,} bytes"
    return (
        f"{what} has {size}, and the limit for a document is "
        f"corpus.max_document_bytes = {max_document_bytes:,}. Check whether the file is damaged or has no line ends. "
        f"If it is correct, raise corpus.max_document_bytes."
    )
