"""The token of a batch job's Ray: one head never takes another's away, and what is no token is said to be none."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import StorageError
from services.common.launch.batch.node import BatchNode
from services.common.launch.batch.ray_token import offering_token, read_token

HEAD = "10.0.0.7"
NODE = BatchNode("3b1f", attempt=1, index=1, num_nodes=2, main_index=0, main_address=HEAD)
LATER = replace(NODE, attempt=2, main_address="10.0.0.8")


def say(text: str) -> None:
    raise AssertionError(text)


def token_file(root: Path) -> Path:
    return root / "ray-tokens" / f"3b1f.1.{HEAD}"


def test_a_token_is_for_this_user_alone_and_goes_with_its_head(tmp_path: Path) -> None:
    assert read_token(tmp_path, NODE) is None
    with offering_token(tmp_path, NODE, HEAD, say) as token:
        assert read_token(tmp_path, NODE) == token
        (path,) = (tmp_path / "ray-tokens").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_token(tmp_path, NODE) is None
    assert list(path.parent.iterdir()) == []


def test_an_old_head_that_wakes_up_leaves_its_successors_token(tmp_path: Path) -> None:
    """It was frozen while Batch gave it up and began the next attempt."""
    old = offering_token(tmp_path, NODE, HEAD, say)
    old.__enter__()
    with offering_token(tmp_path, LATER, LATER.main_address, say) as token:
        assert read_token(tmp_path, NODE) is None, "an attempt that is over leaves no secret behind"
        old.__exit__(None, None, None)
        assert read_token(tmp_path, LATER) == token


def test_two_heads_of_one_attempt_have_their_own_children(tmp_path: Path) -> None:
    """As where somebody runs the same container twice."""
    other = replace(NODE, main_address="10.0.0.9")
    first = offering_token(tmp_path, NODE, HEAD, say)
    token = first.__enter__()
    with offering_token(tmp_path, other, other.main_address, say) as second:
        assert (read_token(tmp_path, NODE), read_token(tmp_path, other)) == (token, second)
    assert read_token(tmp_path, NODE) == token
    first.__exit__(None, None, None)


def test_two_heads_with_one_name_withdraw_their_own_tokens(tmp_path: Path) -> None:
    first = offering_token(tmp_path, NODE, HEAD, say)
    first.__enter__()
    with offering_token(tmp_path, NODE, HEAD, say) as second:
        first.__exit__(None, None, None)
        assert read_token(tmp_path, NODE) == second


def test_a_head_whose_address_batch_tells_otherwise_is_found(tmp_path: Path) -> None:
    with offering_token(tmp_path, NODE, "172.16.0.1", say) as token:
        assert read_token(tmp_path, NODE) == token


def test_a_job_touches_no_token_of_another(tmp_path: Path) -> None:
    another = replace(NODE, job_id="3b1f-2")
    with offering_token(tmp_path, another, HEAD, say) as token, offering_token(tmp_path, LATER, HEAD, say):
        assert read_token(tmp_path, another) == token


def link_to_token(path: Path) -> None:
    aside = path.parent.parent / "elsewhere"
    aside.write_text("0" * 64)
    aside.chmod(0o600)
    path.symlink_to(aside)


def listen(path: Path) -> None:
    place = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{place}/{path.name}")
    os.close(place)


def write(content: bytes, mode: int = 0o600) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(mode)

    return make


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        listen,
        link_to_token,
        lambda path: path.symlink_to("/dev/zero"),
        write(b""),
        write(b"\xff" * 64),
        write("ä".encode() * 32),
        write(b"0" * 63),
        write(b"0" * 65),
        write(b"0" * 10**6),
        write(b"0" * 64, 0o644),
    ],
)
def test_what_is_no_token_ends_a_child_at_once_and_a_head_goes_its_way(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    path = token_file(tmp_path)
    path.parent.mkdir(mode=0o700)
    make(path)
    with pytest.raises(StorageError, match=str(path)):
        read_token(tmp_path, NODE)
    if path.is_dir():
        with pytest.raises(IsADirectoryError), offering_token(tmp_path, NODE, HEAD, say):
            pass
        return
    with offering_token(tmp_path, NODE, HEAD, say) as token:
        assert read_token(tmp_path, NODE) == token
    assert list(path.parent.iterdir()) == []


def as_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    if os.geteuid():
        pytest.skip("needs root, to give a folder away")
    os.chown(folder, 65_534, 65_534)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder.mkdir() or folder.chmod(0o777),
        lambda folder: folder.mkdir() or folder.chmod(0o750),
        as_another_user,
        Path.touch,
        os.mkfifo,
        lambda folder: folder.symlink_to("/tmp"),
    ],
)
def test_a_folder_of_tokens_that_is_not_this_users_alone_is_refused(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "ray-tokens")
    with pytest.raises(StorageError, match="ray-tokens"), offering_token(tmp_path, NODE, HEAD, say):
        pass
    with pytest.raises(StorageError, match="ray-tokens"):
        read_token(tmp_path, NODE)


def test_a_token_that_cannot_be_removed_is_told_and_hides_no_exit_code(tmp_path: Path) -> None:
    told: list[str] = []
    with offering_token(tmp_path, NODE, HEAD, told.append):
        (tmp_path / "ray-tokens").chmod(0o777)
    assert len(told) == 1
    assert "ray-tokens" in told[0]
