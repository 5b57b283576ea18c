"""The images with which a stage succeeded, and the one to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.good_images import (
    GOOD_IMAGES_KEPT,
    add_good_image,
    find_image_before,
    merge_histories,
    read_good_images,
    write_good_images,
)


def image(number: int, registry: str = "here") -> str:
    return f"{registry}/trainer@sha256:{number:064x}"


def test_the_newest_images_are_kept() -> None:
    known: list[str] = []
    for number in range(9):
        known = add_good_image(known, image(number))
    assert known == [image(number) for number in range(9 - GOOD_IMAGES_KEPT, 9)]


def test_an_image_that_was_rolled_back_to_keeps_its_place() -> None:
    assert add_good_image([image(1), image(2)], image(1, "there")) == [image(1), image(2)]


@pytest.mark.parametrize(
    ("known", "present", "before"),
    [
        ([image(1), image(2)], image(2), image(1)),
        ([image(1), image(2)], image(2, "there"), image(1)),
        ([image(1), image(2)], image(9), image(2)),
        ([image(1)], image(1), None),
        ([], image(1), None),
    ],
)
def test_the_image_before(known: list[str], present: str, before: str | None) -> None:
    assert find_image_before(known, present) == before


@pytest.mark.parametrize(
    ("older", "newer", "merged"),
    [([1, 2], [], [1, 2]), ([], [1], [1]), ([1, 2], [2, 3], [1, 2, 3]), ([1, 2], [2, 1], [2, 1])],
)
def test_two_histories_are_merged(older: list[int], newer: list[int], merged: list[int]) -> None:
    assert merge_histories([*map(image, older)], [*map(image, newer)]) == [*map(image, merged)]


def test_a_history_is_kept_under_the_root(tmp_path: Path) -> None:
    assert read_good_images(tmp_path, "trainer") == []
    write_good_images(tmp_path, "trainer", [image(1), image(2)])
    assert read_good_images(tmp_path, "trainer") == [image(1), image(2)]
    assert read_good_images(tmp_path, "compiler") == []
    (tmp_path / "deploy/trainer/good-images.json").write_text("[7]")
    with pytest.raises(ValueError, match="good-images"):
        read_good_images(tmp_path, "trainer")
