"""Places numbered files in a tree of folders, because a folder of millions of files is slow on every file system."""

from __future__ import annotations

from pathlib import Path

NUMBERS_PER_FOLDER = 1_000


def path_in_tree(root: Path, number: int, suffix: str) -> Path:
    """Return the path of a numbered file: number 12,345 is `012/012345` and the suffix.

    Whoever writes the file makes its folder, and never `root`: a writer that wakes up late finds no folder any more.
    """
    return root / f"{number // NUMBERS_PER_FOLDER:03d}" / f"{number:06d}{suffix}"
