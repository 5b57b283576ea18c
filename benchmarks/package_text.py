"""Reads text that every checkout has: sources and documentation of the installed packages, one document per file."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import xxhash

ENDINGS = (".md", ".py", ".pyi", ".pyx", ".rst", ".txt")


@dataclass(frozen=True)
class Text:
    documents: list[bytes]
    description: str
    """Sentence with the source, size and hash of the text."""

    @property
    def bytes(self) -> int:
        return sum(map(len, self.documents))

    def repeat_to(self, num_bytes: int) -> Text:
        """Return this text, repeated until it has `num_bytes` at least. An encoder knows most words of a repetition."""
        if self.bytes >= num_bytes:
            return self
        documents, room = [], num_bytes
        for document in cycle(self.documents):
            documents.append(document)
            room -= len(document)
            if room <= 0:
                break
        return Text(documents, f"{self.description}, repeated to {num_bytes - room:,} bytes")


def read_text(folder: Path | None, max_bytes: int, *, half: int | None = None) -> Text:
    """Read the first `max_bytes` of valid UTF-8 from a folder, or from the installed packages.

    Files are in the order of the hashes of their names, which mixes packages and is the same on every machine with the
    same files. `half` 0 or 1 selects even or odd hashes, so that vocabularies come from files that are not measured.
    """
    root = folder or Path(sysconfig.get_path("purelib"))
    paths = [path for path in root.rglob("*") if path.suffix in ENDINGS or folder is not None]
    hashed = sorted((xxhash.xxh3_64_intdigest(path.relative_to(root).as_posix().encode()), path) for path in paths)
    documents, room, digest = [], max_bytes, xxhash.xxh3_128()
    for number, path in hashed:
        if half is not None and number % 2 != half:
            continue
        for content in _read_utf8(path):
            documents.append(content)
            digest.update(content)
            room -= len(content)
        if room <= 0:
            break
    where = str(folder) if folder else f"sources and documentation of the installed packages ({' '.join(ENDINGS)})"
    size = sum(map(len, documents))
    return Text(documents, f"{where}: {len(documents):,} files, {size:,} bytes, xxh3-128 {digest.hexdigest()}")


def _read_utf8(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, unless it is empty, not a regular file or not UTF-8."""
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return
    if content and b"\0" not in content:
        yield content
