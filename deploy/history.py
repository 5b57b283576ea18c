"""The history of a stage's deployments: the images with which the stage ended well, oldest first.

`<root>/deploy/<stage>/good-images.json` keeps it, so that it outlives the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.input.files import parse_json, read_file

GOOD_IMAGES_KEPT = 5
FOLDER = "deploy"
FILE = "good-images.json"


def add_good_image(known: Sequence[str], image: str) -> list[str]:
    """The history with one image more. An image that was rolled back to keeps its place in the order."""
    digests = map(_digest_of, known)
    return list(known) if _digest_of(image) in digests else [*known, image][-GOOD_IMAGES_KEPT:]


def find_image_before(known: Sequence[str], present: str) -> str | None:
    """The newest good image before the present one, which need not be good itself; None when there is none."""
    digests = [_digest_of(image) for image in known]
    earlier = known[: digests.index(_digest_of(present))] if _digest_of(present) in digests else known
    return earlier[-1] if earlier else None


def merge_histories(older: Sequence[str], newer: Sequence[str]) -> list[str]:
    """Two histories of one stage as one. Where both know an image, the newer one's order holds."""
    digests = {_digest_of(image) for image in newer}
    return [*(image for image in older if _digest_of(image) not in digests), *newer][-GOOD_IMAGES_KEPT:]


def read_good_images(root: Path, stage: str) -> list[str]:
    """Nothing where there is no history. Raises `OSError`, and `ValueError` for what is none."""
    try:
        told = parse_json(read_file(_file_of(root, stage)))
    except FileNotFoundError:
        return []
    if not isinstance(told, list) or not all(isinstance(image, str) for image in told):
        raise ValueError(f"{_file_of(root, stage)} is no list of images")
    return told


def write_good_images(root: Path, stage: str, images: Sequence[str]) -> None:
    """Raises `OSError`."""
    file = _file_of(root, stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, json.dumps(list(images)).encode())


def _file_of(root: Path, stage: str) -> Path:
    return root / FOLDER / stage / FILE


def _digest_of(image: str) -> str:
    """What tells an image from others: its digest, or its whole name where it has none."""
    return image.rpartition("@")[2]
