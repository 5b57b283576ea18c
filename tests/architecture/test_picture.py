"""The picture of the README: taken by a command, and small."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from docs.site.picture import MAX_BYTES, take_picture
from images.platforms import REPOSITORY
from services.common.testing.browser import find_browser


def test_the_picture_of_the_readme_is_small() -> None:
    assert 10_000 < (REPOSITORY / "docs/report.png").stat().st_size < MAX_BYTES


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")
def test_a_picture_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<h1>a page</h1>")
    picture = take_picture(page, width=640, height=480)
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (640, 480)
