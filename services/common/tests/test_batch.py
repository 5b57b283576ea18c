"""A node of an AWS Batch job reads its job from the environment, and the token of the job's Ray from its head."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import DeviceError, RecipeError, StorageError
from services.common.launch.batch.node import (
    RECIPES,
    ROOT_MARKER,
    BatchNode,
    StageCommand,
    deliver_recipe,
    find_node,
    read_command,
    require_recipe,
    require_root,
)
from services.common.launch.batch.ray_token import offering_token, read_token
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, pack_recipe
from services.common.testing.commands import REPOSITORY
from services.common.testing.recipes import recipe_text

CONTENT = recipe_text().encode()
CHILD = {
    "AWS_BATCH_JOB_ID": "3b1f#1",
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}


def test_a_node_knows_its_job_its_index_and_the_main_node() -> None:
    node = find_node(CHILD)
    assert (node.job_id, node.attempt, node.index, node.num_nodes) == ("3b1f", 2, 1, 4)
    assert (node.is_main, node.main_address) == (False, "10.0.0.7")
    assert find_node(CHILD | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}).is_main
    alone = find_node({"AWS_BATCH_JOB_ID": "3b1f"})
    assert (alone.num_nodes, alone.is_main) == (1, True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ID", ""),
        ("ID", "../../etc"),
        ("NODE_INDEX", "4"),
        ("MAIN_NODE_INDEX", "4"),
        ("NUM_NODES", "four"),
        ("ATTEMPT", "0"),
        ("MAIN_NODE_PRIVATE_IPV4_ADDRESS", "main"),
    ],
)
def test_a_variable_that_batch_would_not_set_is_refused(name: str, wrong: str) -> None:
    with pytest.raises(DeviceError, match=f"AWS_BATCH_JOB_{name}"):
        find_node(CHILD | {f"AWS_BATCH_JOB_{name}": wrong})


@pytest.fixture
def command(tmp_path: Path) -> StageCommand:
    """A stage's command whose recipe has the name of its content."""
    recipe = tmp_path / RECIPES / f"{hashlib.sha256(CONTENT).hexdigest()}.toml"
    return read_command(["python", "-m", "services.trainer", f"--recipe={recipe}", "--root", str(tmp_path)])


def test_a_recipe_travels_in_the_job_and_is_written_once(command: StageCommand) -> None:
    deliver_recipe(command, {})
    with pytest.raises(RecipeError):
        require_recipe(command)
    packed = {RECIPE_VARIABLE: pack_recipe(CONTENT)}
    deliver_recipe(command, packed)
    written = command.recipe.stat()
    deliver_recipe(command, packed)
    assert (command.recipe.read_bytes(), command.recipe.stat().st_ino) == (CONTENT, written.st_ino)
    command.recipe.write_bytes(b"")  # of a machine that lost its power
    with pytest.raises(RecipeError, match=hashlib.sha256(b"").hexdigest()):
        require_recipe(command)
    deliver_recipe(command, packed)
    require_recipe(command)


@pytest.mark.parametrize("packed", ["eJ!", "bm9uZQ==", pack_recipe(b"x"), pack_recipe(b"x")[:-4]])
def test_a_recipe_that_did_not_travel_whole_is_refused(command: StageCommand, packed: str) -> None:
    with pytest.raises(RecipeError):
        deliver_recipe(command, {RECIPE_VARIABLE: packed})


def test_the_command_is_the_stages_with_the_last_of_each_option() -> None:
    words = ["python", "-m", "services.compiler", "--root", "/a", "--recipe", "x.toml", "--root=/b"]
    command = read_command(words)
    assert (command.stage, command.recipe, command.root) == ("compiler", Path("x.toml"), Path("/b"))
    for incomplete in (words[:3], words[3:], words[:5]):
        with pytest.raises(RecipeError):
            read_command(incomplete)


def test_a_root_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "fsx" / "team"
    root.mkdir(parents=True)
    with pytest.raises(StorageError, match="fsx/team"):
        require_root(root)
    (tmp_path / "fsx" / ROOT_MARKER).touch()
    require_root(root)


def test_a_job_of_one_node_runs_the_stage_in_place_of_itself(tmp_path: Path) -> None:
    """The stage's command replaces the batch program, in the same process."""
    (tmp_path / ROOT_MARKER).touch()
    shown = "os.getpid(), os.environ['MILLRACE_WEBHOOK']"
    stage = [sys.executable, "-c", f"import os; print({shown}); raise SystemExit(3)"]
    command = [*stage, "-m", "services.trainer", "--recipe", "none", "--root", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "services.trainer", "batch", "--cpus", "2", "--", *command],
        cwd=REPOSITORY,
        env={**os.environ, "AWS_BATCH_JOB_ID": "3b1f", "AWS_BATCH_JOB_ATTEMPT": "2", "MILLRACE_WEBHOOK": "url"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (3, f"{process.pid} url\n")


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
