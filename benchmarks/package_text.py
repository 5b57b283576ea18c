"""Text that every checkout has: the sources and the documentation of the installed packages, a file a document."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

ENDINGS = (".md", ".py", ".pyi", ".pyx", ".rst", ".txt")


@dataclass(frozen=True)
class Text:
    documents: list[bytes]
    description: str
    """Where it is from, how much it is, and the hash of all of it."""

    @property
    def bytes(self) -> int:
        return sum(map(len, self.documents))


def read_text(folder: Path | None, max_bytes: int, *, half: int | None = None) -> Text:
    """The first `max_bytes` of valid UTF-8 below a folder, or of the installed packages.

    In an order that mixes packages, and the same on every machine with the same files: by the hash of the names. `half`
    0 or 1 takes the files of which the hash is even or odd, so that a vocabulary can be trained on the others.
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
    """The file, unless it is empty, no file or no text."""
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return
    if content and b"\0" not in content:
        yield content
