"""Archives of wikicorpus that are damaged or incomplete are refused by name."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, cut_off, overwrite

ARTICLE = '<doc id="12" title="%s" nonfiltered="1" processed="1" dbindex="0">\n%s\n\nENDOFARTICLE.\n</doc>\n'


def write_archive(path: Path, *members: str, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for number, text in enumerate(members):
            entry = tarfile.TarInfo(f"raw.en/englishText_{number}")
            entry.size = len(text.encode("latin-1"))
            archive.addfile(entry, io.BytesIO(text.encode("latin-1")))
    return path


def wikicorpus(path: Path) -> str:
    return f'[[corpus.sources]]\nuri = "{path}"\nformat = "wikicorpus"\n'


ARTICLES = [ARTICLE % (f"Title {number}", text) for number, text in enumerate(TEXTS)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_wikicorpus_archive_that_is_cut_off_is_named(stage: Stage, tmp_path: Path, share: float) -> None:
    path = write_archive(tmp_path / "raw.en.tgz", "".join(ARTICLES[:30]), "".join(ARTICLES[30:]))
    cut_off(path, int(path.stat().st_size * share))
    assert "raw.en.tgz: " in stage.refuse(3, sources=wikicorpus(path))


def test_a_wikicorpus_archive_whose_checksum_does_not_fit_is_named(stage: Stage, tmp_path: Path) -> None:
    """The checksum of gzip follows the archive's padding, which a reader of archives need not read."""
    archive = write_archive(tmp_path / "raw.en.tar", "".join(ARTICLES), mode="w")
    path = tmp_path / "raw.en.tgz"
    path.write_bytes(gzip.compress(archive.read_bytes() + bytes(3 * 2**20)))
    overwrite(path, path.stat().st_size - 8, b"\0\0\0\0")
    assert "raw.en.tgz: " in stage.refuse(3, sources=wikicorpus(path))


def test_a_wikicorpus_archive_that_is_no_archive_is_named(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "raw.en.tgz").write_bytes(gzip.compress("".join(ARTICLES).encode()))
    assert "raw.en.tgz: " in stage.refuse(3, sources=wikicorpus(tmp_path / "raw.en.tgz"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ARTICLES[0] + ARTICLES[1].replace("</doc>\n", ""), (ARTICLES[0] + ARTICLES[1]).count("\n") - 1),
        (ARTICLES[0].replace("</doc>\n", "") + ARTICLES[1], ARTICLES[0].count("\n")),
        (ARTICLES[0] + "nobody's line\n", ARTICLES[0].count("\n") + 1),
    ],
    ids=["an end is missing", "an end is missing before the next begin", "a line between two articles"],
)
def test_a_wikicorpus_member_without_whole_articles_is_named_with_its_line(
    stage: Stage, tmp_path: Path, text: str, line: int
) -> None:
    path = write_archive(tmp_path / "raw.en.tgz", "".join(ARTICLES[2:]), text)
    assert f"raw.en.tgz: raw.en/englishText_1:{line}: " in stage.refuse(3, sources=wikicorpus(path))
