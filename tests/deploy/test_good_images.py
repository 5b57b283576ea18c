"""The images with which a stage ended well, and the one to go back to."""

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


def test_two_histories_are_merged() -> None:
    assert merge_histories([image(1), image(2)], []) == [image(1), image(2)]
    assert merge_histories([], [image(1)]) == [image(1)]
    assert merge_histories([image(1), image(2)], [image(2), image(3)]) == [image(1), image(2), image(3)]
    assert merge_histories([image(1), image(2)], [image(2), image(1)]) == [image(2), image(1)]


def test_a_history_is_kept_under_the_root(tmp_path: Path) -> None:
    assert read_good_images(tmp_path, "trainer") == []
    write_good_images(tmp_path, "trainer", [image(1), image(2)])
    assert read_good_images(tmp_path, "trainer") == [image(1), image(2)]
    assert read_good_images(tmp_path, "compiler") == []
    assert [path.name for path in (tmp_path / "deploy/trainer").iterdir()] == ["good-images.json"]


@pytest.mark.parametrize("text", ["{", "7", "[7]", '{"a": 1}'])
def test_what_is_no_history_is_told(tmp_path: Path, text: str) -> None:
    write_good_images(tmp_path, "trainer", [])
    (tmp_path / "deploy/trainer/good-images.json").write_text(text)
    with pytest.raises(ValueError, match=r".+"):
        read_good_images(tmp_path, "trainer")
