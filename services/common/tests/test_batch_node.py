"""What a node of an AWS Batch job knows of its job, and what it refuses to start without."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import DeviceError, RecipeError, StorageError
from services.common.launch.batch_node import (
    RECIPE_VARIABLE,
    RECIPES,
    ROOT_MARKER,
    deliver_recipe,
    find_node,
    offer_token,
    pack_recipe,
    read_command,
    read_token,
    require_recipe,
    require_root,
    withdraw_token,
)
from services.common.testing.recipes import recipe_text
from services.common.tests.builders import REPOSITORY

CHILD = {
    "AWS_BATCH_JOB_ID": "3b1f#1",
    "AWS_BATCH_JOB_ATTEMPT": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}


def test_a_child_knows_its_job_its_index_and_the_main_node() -> None:
    node = find_node(CHILD)
    assert (node.job_id, node.attempt, node.index, node.num_nodes) == ("3b1f", 2, 1, 4)
    assert (node.is_main, node.main_address) == (False, "10.0.0.7")


def test_the_main_node_is_the_one_that_batch_names() -> None:
    assert find_node(CHILD | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}).is_main


def test_a_job_of_one_container_is_its_own_main_node() -> None:
    node = find_node({"AWS_BATCH_JOB_ID": "3b1f"})
    assert (node.num_nodes, node.is_main) == (1, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"AWS_BATCH_JOB_ID": ""}, "no container of an AWS Batch job"),
        ({"AWS_BATCH_JOB_NODE_INDEX": "4"}, "expected less than"),
        ({"AWS_BATCH_JOB_NUM_NODES": "four"}, "expected a number"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}, "cannot find the main node"),
    ],
)
def test_variables_that_batch_would_not_set_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        find_node(CHILD | changed)


def test_a_root_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "fsx" / "team"
    with pytest.raises(StorageError, match="not mounted"):
        require_root(root)
    root.mkdir(parents=True)
    with pytest.raises(StorageError, match="an empty folder"):
        require_root(root)
    (tmp_path / "fsx" / ROOT_MARKER).touch()
    require_root(root)


def test_a_recipe_whose_content_is_not_its_names_is_refused(tmp_path: Path) -> None:
    content = recipe_text().encode()
    recipe = tmp_path / RECIPES / f"{hashlib.sha256(content).hexdigest()}.toml"
    command = read_command(["python", "-m", "services.trainer", f"--recipe={recipe}", "--root", str(tmp_path)])
    with pytest.raises(RecipeError, match="No such file"):
        require_recipe(command)
    recipe.parent.mkdir()
    recipe.write_bytes(content)
    require_recipe(command)
    recipe.write_bytes(content[:-1])
    with pytest.raises(RecipeError, match="changed after the job was submitted"):
        require_recipe(command)


def test_a_recipe_travels_in_the_job_and_is_written_once(tmp_path: Path) -> None:
    content = recipe_text().encode()
    recipe = tmp_path / RECIPES / f"{hashlib.sha256(content).hexdigest()}.toml"
    command = read_command(["python", "-m", "services.trainer", f"--recipe={recipe}", "--root", str(tmp_path)])
    deliver_recipe(command, {})
    assert not recipe.exists()
    packed = {RECIPE_VARIABLE: pack_recipe(content)}
    deliver_recipe(command, packed)
    written = recipe.stat()
    deliver_recipe(command, packed)
    assert (recipe.read_bytes(), recipe.stat().st_ino) == (content, written.st_ino)
    recipe.write_bytes(b"")  # of a machine that lost its power
    deliver_recipe(command, packed)
    require_recipe(command)


@pytest.mark.parametrize(
    ("packed", "message"),
    [("eJ!", "is no packed recipe"), ("bm9uZQ==", "is no packed recipe"), (pack_recipe(b"x"), "reads")],
)
def test_a_recipe_that_did_not_travel_whole_is_refused(tmp_path: Path, packed: str, message: str) -> None:
    command = read_command(["python", "-m", "services.trainer", "--recipe=/fsx/a.toml", "--root", str(tmp_path)])
    with pytest.raises(RecipeError, match=message):
        deliver_recipe(command, {RECIPE_VARIABLE: packed})


def test_the_command_is_the_stages_with_the_last_of_each_option() -> None:
    words = [
        "python",
        "-m",
        "services.compiler",
        "--root",
        "/a",
        "--recipe",
        "x.toml",
        "--root=/b",
        "--train.max_steps=7",
    ]
    command = read_command(words)
    assert (command.stage, command.recipe, command.root) == ("compiler", Path("x.toml"), Path("/b"))
    for incomplete in (words[:3], words[3:], [*words[:5]]):
        with pytest.raises(RecipeError, match="expected the stage's command"):
            read_command(incomplete)


def test_the_token_of_an_attempt_is_for_this_user_alone_and_replaced_by_the_next(tmp_path: Path) -> None:
    node = find_node(CHILD)
    assert read_token(tmp_path, node) is None
    first = offer_token(tmp_path, node)
    assert read_token(tmp_path, node) == first != offer_token(tmp_path, node)
    (path,) = (tmp_path / "ray-tokens").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    withdraw_token(tmp_path, node)
    assert read_token(tmp_path, node) is None


def test_a_job_of_one_node_runs_the_stage_in_place_of_itself(tmp_path: Path) -> None:
    """After the word with which the image's entry point goes on."""
    (tmp_path / ROOT_MARKER).touch()
    stage = [sys.executable, "-c", "import os; print(os.getpid(), os.environ.get('RAY_ADDRESS')); raise SystemExit(3)"]
    command = [*stage, "-m", "services.trainer", "--recipe", "none", "--root", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "services.trainer", "batch", "--cpus", "2", "--", *command],
        cwd=REPOSITORY,
        env={**os.environ, "AWS_BATCH_JOB_ID": "3b1f", "RAY_ADDRESS": ""},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (3, f"{process.pid} \n")
