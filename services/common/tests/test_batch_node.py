"""A node of an AWS Batch job reads its job from the environment, and refuses to start without it."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import DeviceError, RecipeError, StorageError
from services.common.launch.batch.node import (
    RECIPES,
    ROOT_MARKER,
    deliver_recipe,
    find_node,
    read_command,
    require_recipe,
    require_root,
)
from services.common.recipe.packed_recipe import MOST_RECIPE_BYTES, RECIPE_VARIABLE, pack_recipe, unpack_recipe
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
        ({"AWS_BATCH_JOB_ID": ""}, "AWS_BATCH_JOB_ID=''"),
        ({"AWS_BATCH_JOB_ID": "../../etc"}, "AWS_BATCH_JOB_ID='../../etc'"),
        ({"AWS_BATCH_JOB_ID": "j" * 5_000}, "AWS_BATCH_JOB_ID='jjj"),
        ({"AWS_BATCH_JOB_ID": "\u00fc\udcff"}, "AWS_BATCH_JOB_ID="),
        ({"AWS_BATCH_JOB_NODE_INDEX": "4"}, "AWS_BATCH_JOB_NODE_INDEX=4.*AWS_BATCH_JOB_NUM_NODES=4"),
        ({"AWS_BATCH_JOB_MAIN_NODE_INDEX": "4"}, "AWS_BATCH_JOB_MAIN_NODE_INDEX=4.*AWS_BATCH_JOB_NUM_NODES=4"),
        ({"AWS_BATCH_JOB_NUM_NODES": "four"}, "AWS_BATCH_JOB_NUM_NODES='four'.* from 1 to 10,000"),
        ({"AWS_BATCH_JOB_NUM_NODES": "0"}, "AWS_BATCH_JOB_NUM_NODES='0'"),
        ({"AWS_BATCH_JOB_NUM_NODES": "999999"}, "AWS_BATCH_JOB_NUM_NODES='999999'"),
        ({"AWS_BATCH_JOB_ATTEMPT": "0"}, "AWS_BATCH_JOB_ATTEMPT='0'"),
        ({"AWS_BATCH_JOB_NODE_INDEX": ""}, "AWS_BATCH_JOB_NODE_INDEX is not set"),
        ({"AWS_BATCH_JOB_MAIN_NODE_INDEX": " "}, "AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"),
        ({"AWS_BATCH_JOB_ATTEMPT": ""}, "AWS_BATCH_JOB_ATTEMPT is not set"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}, "PRIVATE_IPV4_ADDRESS is not set"),
        *(
            ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": wrong}, "PRIVATE_IPV4_ADDRESS='.*10.0.0.7")
            for wrong in ("main", "10.0.0.777", "0.0.0.0", "10.0.0.7/24", "\u0661.2.3.4", "1" * 5_000, "\udcff")
        ),
        *(
            ({f"AWS_BATCH_JOB_{name}": wrong}, f"AWS_BATCH_JOB_{name}='")
            for name in ("ATTEMPT", "NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX")
            for wrong in ("-1", "9" * 5_000, "\u0663", "1.0", "\udcff", "0x1")
        ),
    ],
)
def test_variables_that_batch_would_not_set_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message) as refused:
        find_node(CHILD | changed)
    assert len(str(refused.value)) < 1_000
    str(refused.value).encode()


def test_a_root_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "fsx" / "team"
    with pytest.raises(StorageError, match=f"fsx/team: no folder.*{ROOT_MARKER}"):
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
    with pytest.raises(RecipeError, match=hashlib.sha256(content[:-1]).hexdigest()):
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
    [("eJ!", RECIPE_VARIABLE), ("bm9uZQ==", RECIPE_VARIABLE), (pack_recipe(b"x"), "/fsx/a.toml")],
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
        with pytest.raises(RecipeError, match="--recipe"):
            read_command(incomplete)


BOMB = base64.b64encode(zlib.compress(b"a" * 12_000_000, level=9)).decode()


@pytest.mark.parametrize("packed", [BOMB, "A" * 2**20, f"{pack_recipe(b'x')[:-4]}", pack_recipe(b"\xff"), "\udcff"])
def test_a_packed_recipe_unfolds_to_a_bounded_size(packed: str) -> None:
    """A packed recipe of a few characters may unfold to gigabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match=RECIPE_VARIABLE):
            unpack_recipe(packed)
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST_RECIPE_BYTES
    finally:
        tracemalloc.stop()


def test_what_is_packed_is_unpacked_and_no_more_is_packed_than_that() -> None:
    largest = b"a" * MOST_RECIPE_BYTES
    assert unpack_recipe(pack_recipe(largest)) == largest
    with pytest.raises(RecipeError, match=f"{MOST_RECIPE_BYTES:,}"):
        pack_recipe(largest + b"a")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_in_the_place_of_a_recipe_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    content = recipe_text().encode()
    recipe = tmp_path / RECIPES / f"{hashlib.sha256(content).hexdigest()}.toml"
    command = read_command(["python", "-m", "services.trainer", f"--recipe={recipe}", "--root", str(tmp_path)])
    recipe.parent.mkdir()
    make(recipe)
    with pytest.raises(RecipeError, match=recipe.name):
        require_recipe(command)


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


def test_a_command_that_is_no_program_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / ROOT_MARKER).touch()
    words = ["no-such-python", "-m", "services.trainer", "--recipe", "none", "--root", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "services.common.launch.batch.job", "--", *words],
        cwd=REPOSITORY,
        env={**os.environ, "AWS_BATCH_JOB_ID": "3b1f"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == RecipeError.exit_code, done.stderr
    assert "no-such-python" in done.stderr
    assert "Traceback" not in done.stderr
