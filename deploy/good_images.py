"""Keeps the images with which a stage succeeded, oldest first, for rollbacks.

The list is stored in `<root>/deploy/<stage>/good-images.json`, so that it outlives the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts.manifest import write_durably

GOOD_IMAGES_KEPT = 5
FOLDER = "deploy"
FILE = "good-images.json"


def add_good_image(known: Sequence[str], image: str) -> list[str]:
    """The list with one more image. An image that is in the list already keeps its place, as after a rollback."""
    digests = map(_digest_of, known)
    return list(known) if _digest_of(image) in digests else [*known, image][-GOOD_IMAGES_KEPT:]


def find_image_before(known: Sequence[str], present: str) -> str | None:
    """The newest good image that is older than the present image, which need not be good; None where there is none."""
    digests = [_digest_of(image) for image in known]
    earlier = known[: digests.index(_digest_of(present))] if _digest_of(present) in digests else known
    return earlier[-1] if earlier else None


def merge_histories(older: Sequence[str], newer: Sequence[str]) -> list[str]:
    """The two lists of a stage as one. An image of both has its place in the newer list."""
    digests = {_digest_of(image) for image in newer}
    return [*(image for image in older if _digest_of(image) not in digests), *newer][-GOOD_IMAGES_KEPT:]


def read_good_images(root: Path, stage: str) -> list[str]:
    """The stored list; empty where there is none. Raises `OSError`, and `ValueError` for a file that holds no list."""
    try:
        stored = json.loads(_file_of(root, stage).read_bytes())
    except FileNotFoundError:
        return []
    if not isinstance(stored, list) or not all(isinstance(image, str) for image in stored):
        raise ValueError(f"{_file_of(root, stage)} does not hold a list of images")
    return stored


def write_good_images(root: Path, stage: str, images: Sequence[str]) -> None:
    """Raises `OSError`."""
    file = _file_of(root, stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, json.dumps(list(images)).encode())


def _file_of(root: Path, stage: str) -> Path:
    return root / FOLDER / stage / FILE


def _digest_of(image: str) -> str:
    """The digest of an image, or its whole name where it has none."""
    return image.rpartition("@")[2]
