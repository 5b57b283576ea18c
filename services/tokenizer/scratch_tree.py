"""Places numbered files in a tree of folders, because a folder of millions of files is slow on every file system."""

from __future__ import annotations

from pathlib import Path

from services.common.artifacts.corpus import Split

NUMBERS_PER_FOLDER = 1_000


def path_in_tree(root: Path, number: int, suffix: str) -> Path:
    """Return the path of a numbered file: number 12,345 is `012/012345` and the suffix.

    Whoever writes the file makes its folder, and never `root`: a writer that wakes up late finds no folder any more.
    """
    return root / f"{number // NUMBERS_PER_FOLDER:03d}" / f"{number:06d}{suffix}"


def key_path(root: Path, key: str) -> Path:
    """Return the path of the file that has the number of the partition with this key."""
    return root / f"key-{key[:2]}" / key


def tokens_path(root: Path, partition: int, split: Split) -> Path:
    """Return the path of the tokens that a partition has in a split."""
    return path_in_tree(root, partition, f".{split}.tokens")


def starts_path(root: Path, partition: int, split: Split) -> Path:
    """Return the path of the positions in the tokens of a partition at which documents begin."""
    return path_in_tree(root, partition, f".{split}.starts")
