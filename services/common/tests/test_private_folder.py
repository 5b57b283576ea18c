"""Folders in the temporary directory: this user's alone, and gone with the last process that uses them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from services.common.errors import StorageError
from services.common.process.private_folder import private_base, private_folder, require_private


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_for_this_user_alone_and_goes_with_its_user() -> None:
    with private_folder("node") as folder:
        assert folder.parent == private_base()
        assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}

    assert list(private_base().iterdir()) == []


def test_a_base_that_others_may_look_into_is_closed(temporary: Path) -> None:
    base = temporary / f"millrace-{os.getuid()}"
    base.mkdir()
    base.chmod(0o755)

    assert private_base() == base
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_base_that_is_a_link_or_a_file_or_writable_by_others_is_refused(temporary: Path) -> None:
    base = temporary / f"millrace-{os.getuid()}"
    (temporary / "elsewhere").mkdir()
    base.symlink_to(temporary / "elsewhere")
    with pytest.raises(StorageError, match=rf"{base} is not a folder(.|\n)*set TMPDIR to a folder of your own"):
        private_base()

    base.unlink()
    base.touch()
    with pytest.raises(StorageError, match="is not a folder"):
        private_base()

    base.unlink()
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(StorageError, match=r"can be written by others \(mode 0777\)"):
        private_base()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_base_that_another_user_made_first_is_refused(temporary: Path) -> None:
    base = temporary / f"millrace-{os.getuid()}"
    base.mkdir(mode=0o700)
    os.chown(base, 12_345, 12_345)

    with pytest.raises(StorageError, match="belongs to user 12345, and this is user 0"):
        require_private(base)


@pytest.mark.parametrize("name", ["a space", "a#hash", "quo'te", 'double"', "é"])
def test_a_temporary_directory_whose_path_needs_quoting_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))

    assert private_base() == Path(f"/tmp/millrace-{os.getuid()}")


def test_the_last_of_several_users_removes_the_folder() -> None:
    with private_folder("node") as folder:
        with private_folder("node") as same:
            (same / "copy").touch()
        assert (folder / "copy").exists()

    assert not folder.exists()


def _use_and_die(temporary: str) -> None:
    tempfile.tempdir = temporary
    with private_folder("dead") as folder:
        (folder / "copy").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_command_left_goes_and_what_a_live_one_uses_stays(temporary: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_use_and_die, args=(str(temporary),))
    process.start()
    process.join()
    assert (private_base() / "dead" / "copy").exists()
    unknown = private_base() / "without-a-lock"
    unknown.mkdir()

    with private_folder("live") as live, private_folder("another"):
        assert live.exists()
        assert not (private_base() / "dead").exists()

    assert list(private_base().iterdir()) == [unknown]
