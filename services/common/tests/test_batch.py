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
    "variables", [{}, {**CHILD, "AWS_BATCH_JOB_NUM_NODES": "four"}, {**CHILD, "AWS_BATCH_JOB_ATTEMPT": ""}]
)
def test_outside_of_a_job_the_command_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match="AWS_BATCH_JOB_ID"):
        find_node(variables)


@pytest.fixture
def command(tmp_path: Path) -> StageCommand:
    """A stage's command whose recipe has the name of its content."""
    recipe = tmp_path / RECIPES / f"{hashlib.sha256(CONTENT).hexdigest()}.toml"
    return read_command(["python", "-m", "services.trainer", f"--recipe={recipe}", "--root", str(tmp_path)])


def test_a_recipe_travels_in_the_job(command: StageCommand) -> None:
    deliver_recipe(command, {})
    assert not command.recipe.exists()
    deliver_recipe(command, {RECIPE_VARIABLE: pack_recipe(CONTENT)})
    assert command.recipe.read_bytes() == CONTENT


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


NODE = BatchNode("3b1f", attempt=1, index=1, num_nodes=2, main_index=0, main_address="10.0.0.7")


def test_a_token_is_for_this_user_alone_and_goes_with_its_head(tmp_path: Path) -> None:
    assert read_token(tmp_path, NODE) is None
    with offering_token(tmp_path, NODE) as token:
        assert read_token(tmp_path, NODE) == token
        (path,) = (tmp_path / "ray-tokens").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for another in (replace(NODE, job_id="3b1f-2"), replace(NODE, attempt=2)):
            assert read_token(tmp_path, another) is None
    assert read_token(tmp_path, NODE) is None
    assert list(path.parent.iterdir()) == []
