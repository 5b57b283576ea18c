"""The picture of the README: taken by a command, small, and of a report."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from docs.site.picture import MOST_BYTES, find_page, take_picture
from services.common.errors import ArtifactError
from services.common.testing.browser import find_browser
from tests.architecture.imports import REPOSITORY

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on PATH")


def test_the_picture_of_the_readme_is_small() -> None:
    assert 10_000 < (REPOSITORY / "docs/report.png").stat().st_size < MOST_BYTES


def test_the_newest_report_of_a_folder_of_runs_is_found(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        find_page(tmp_path)
    for run, seconds in (("old", 1_000), ("new", 2_000)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "report.html").write_text("<p>a run</p>")
        os.utime(tmp_path / run / "report.html", (seconds, seconds))
    assert find_page(tmp_path) == tmp_path / "new/report.html"


@needs_browser
def test_a_picture_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<h1>a page</h1>")
    picture = take_picture(page, width=640, height=480)
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (640, 480)
