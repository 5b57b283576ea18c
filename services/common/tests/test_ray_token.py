"""The token of a batch job's Ray: a head never takes another head's token, and a file without a token is refused."""

from __future__ import annotations

import stat
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


def test_a_token_is_for_this_user_alone_and_goes_with_its_head(tmp_path: Path) -> None:
    assert read_token(tmp_path, NODE) is None
    with offering_token(tmp_path, NODE, HEAD, say) as token:
        assert read_token(tmp_path, NODE) == token
        (path,) = (tmp_path / "ray-tokens").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_token(tmp_path, NODE) is None
    assert list(path.parent.iterdir()) == []


def test_a_head_of_an_earlier_attempt_leaves_its_successors_token(tmp_path: Path) -> None:
    old = offering_token(tmp_path, NODE, HEAD, say)
    old.__enter__()
    with offering_token(tmp_path, LATER, LATER.main_address, say) as token:
        assert read_token(tmp_path, NODE) is None, "an attempt that is over leaves no secret behind"
        old.__exit__(None, None, None)
        assert read_token(tmp_path, LATER) == token


def test_a_head_whose_address_batch_tells_otherwise_is_found(tmp_path: Path) -> None:
    with offering_token(tmp_path, NODE, "172.16.0.1", say) as token:
        assert read_token(tmp_path, NODE) == token


def test_a_job_touches_no_token_of_another(tmp_path: Path) -> None:
    another = replace(NODE, job_id="3b1f-2")
    with offering_token(tmp_path, another, HEAD, say) as token, offering_token(tmp_path, LATER, HEAD, say):
        assert read_token(tmp_path, another) == token


@pytest.mark.parametrize(("content", "mode"), [(b"", 0o600), (b"0" * 63, 0o600), (b"0" * 64, 0o644)])
def test_what_is_no_private_token_is_refused_by_a_child_and_replaced_by_a_head(
    tmp_path: Path, content: bytes, mode: int
) -> None:
    path = tmp_path / "ray-tokens" / f"3b1f.1.{HEAD}"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(StorageError, match=str(path)):
        read_token(tmp_path, NODE)
    with offering_token(tmp_path, NODE, HEAD, say) as token:
        assert read_token(tmp_path, NODE) == token


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_of_tokens_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "ray-tokens").mkdir()
    (tmp_path / "ray-tokens").chmod(mode)
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
