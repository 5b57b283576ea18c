"""The images with which a stage succeeded, and the one to go back to."""

from __future__ import annotations

import pytest

from deploy.good_images import GOOD_IMAGES_KEPT, add_good_image, find_image_before, merge_histories


def image(number: int, registry: str = "here") -> str:
    return f"{registry}/trainer@sha256:{number:064x}"


def test_the_newest_images_are_kept() -> None:
    known: list[str] = []
    for number in range(9):
        known = add_good_image(known, image(number))
    assert known == [image(number) for number in range(9 - GOOD_IMAGES_KEPT, 9)]


@pytest.mark.parametrize(
    ("older", "newer", "merged"),
    [([1, 2], [], [1, 2]), ([], [1], [1]), ([1, 2], [2, 3], [1, 2, 3]), ([1, 2], [2, 1], [2, 1])],
)
def test_two_histories_are_merged(older: list[int], newer: list[int], merged: list[int]) -> None:
    assert merge_histories([*map(image, older)], [*map(image, newer)]) == [*map(image, merged)]


def test_an_image_is_known_by_its_digest_whatever_registry_has_it() -> None:
    assert add_good_image([image(1), image(2)], image(1, "there")) == [image(1), image(2)]
    assert find_image_before([image(1), image(2)], image(2, "there")) == image(1)
