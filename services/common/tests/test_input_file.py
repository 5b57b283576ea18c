"""Files that somebody else supplies are opened in one way, which never waits and never leaves their folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from services.common.errors import ArtifactError, LimitError, StorageError, TryAgain, UnreadableError
from services.common.input.files import (
    MAX_KEYS,
    MAX_VALUES,
    InputFileError,
    open_for_append,
    open_regular_file,
    parse_json,
    read_file,
    require_regular_file,
    stat_within,
    unreadable,
)
from services.common.testing.strange_files import STRANGE_FILES, replace_by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a" / "b"
    made.mkdir(parents=True)
    return made


@pytest.mark.parametrize("kind", STRANGE_FILES)
def test_what_is_no_regular_file_of_the_folder_is_refused_at_once(folder: Path, kind: str) -> None:
    path = folder / "file"
    replace_by(kind, path)

    for work in (
        lambda: open_regular_file(path, within=folder),
        lambda: require_regular_file(path, within=folder),
        lambda: stat_within(folder, "file"),
        lambda: read_file(path, within=folder),
    ):
        with pytest.raises(InputFileError) as caught:
            work()
        assert caught.value.filename == str(path)
        assert caught.value.strerror


def test_a_link_that_a_person_names_is_that_persons(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"content")
    (folder / "link").symlink_to(tmp_path / "outside")

    assert read_file(folder / "link") == b"content"
    with pytest.raises(InputFileError, match="a link that leads out of"):
        read_file(folder / "link", within=folder)


@pytest.mark.parametrize("name", ["x" * 5_000, "a/" * 2_500, "nul\0", "half\udc00pair\ud800"])
def test_a_name_that_no_file_can_have_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InputFileError):
        read_file(folder / name, within=folder)


def test_the_snapshots_of_hugging_faces_cache_are_read_whose_files_are_links_to_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1234").write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "model.safetensors").symlink_to("../../../elsewhere")
    (tmp_path / "elsewhere").touch()

    assert read_file(snapshot / "config.json", within=snapshot) == b"{}"
    with pytest.raises(InputFileError, match="a link that leads out of"):
        require_regular_file(snapshot / "model.safetensors", within=snapshot)


def test_a_file_that_is_larger_than_its_kind_is_not_read(folder: Path) -> None:
    with (folder / "sparse").open("wb") as file:
        file.truncate(2**40)

    with pytest.raises(InputFileError, match="1,099,511,627,776 bytes, expected at most 1,024"):
        read_file(folder / "sparse", max_bytes=1_024)
    with pytest.raises(InputFileError):
        read_file(folder / "sparse")


@pytest.mark.parametrize("kind", [kind for kind in STRANGE_FILES if "outside" not in kind and "nowhere" not in kind])
def test_nothing_is_appended_to_what_is_no_regular_file(folder: Path, kind: str) -> None:
    replace_by(kind, folder / "lines")

    with pytest.raises(StorageError, match="Move it away"):
        open_for_append(folder / "lines")


def test_nothing_is_appended_through_a_link_to_a_folder_that_is_not_there(folder: Path) -> None:
    (folder / "lines").symlink_to("/nowhere/at/all")

    with pytest.raises(StorageError, match="Move it away"):
        open_for_append(folder / "lines")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EMFILE, LimitError),
        (errno.ENFILE, TryAgain),
        (errno.ESTALE, TryAgain),
        (errno.EACCES, UnreadableError),
        (errno.EIO, ArtifactError),
        (errno.EISDIR, ArtifactError),
    ],
)
def test_what_cannot_be_read_is_damaged_only_where_its_bytes_are_wrong(number: int, expected: type) -> None:
    assert type(unreadable(Path("file"), OSError(number, os.strerror(number)))) is expected


@pytest.mark.parametrize(
    "content",
    [b"[" + b"1," * (MAX_VALUES + 1) + b"1]", b"{" + b",".join(b'"%d":1' % key for key in range(MAX_KEYS + 1)) + b"}"],
)
def test_json_of_more_values_than_any_program_writes_is_not_taken_into_memory(content: bytes) -> None:
    with pytest.raises(ValueError, match="expected at most"):
        parse_json(content)
