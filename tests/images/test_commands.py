"""What a user sees who asks for an image that cannot be built: what is missing, and the next command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from images.platforms import REPOSITORY


def run_images(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "images", command],
        cwd=REPOSITORY,
        env={**os.environ, "DOCKER_HOST": "unix:///nonexistent.sock", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["build", "demo", "base"])
def test_without_a_docker_command_the_message_names_the_package(command: str, tmp_path: Path) -> None:
    done = run_images(command, PATH=str(tmp_path))
    assert done.returncode == 4
    assert "no docker command on PATH" in done.stderr
    assert "apt-get install docker.io" in done.stderr


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command; an engine is not needed")
@pytest.mark.parametrize("command", ["build", "demo", "base"])
def test_without_an_engine_the_message_says_how_to_start_one(command: str) -> None:
    done = run_images(command)
    assert done.returncode == 4
    assert "no Docker engine answers" in done.stderr
    assert "dockerd" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["build", "demo", "sbom", "release"])
def test_a_stage_that_does_not_exist_is_answered_with_those_that_do(command: str) -> None:
    done = run_images(command, STAGE="tokeniser")
    assert done.returncode == 2
    assert "there is no stage 'tokeniser': STAGE is one of tokenizer, compiler, trainer" in done.stderr


def test_a_variant_that_does_not_exist_is_answered_with_those_that_do() -> None:
    done = run_images("build", VARIANT="gpu")
    assert done.returncode == 2
    assert "there is no variant 'gpu': VARIANT is one of cpu, neuron" in done.stderr


def test_a_release_names_its_stage() -> None:
    done = run_images("release", STAGE="", BUMP="minor")
    assert done.returncode == 2
    assert "make release STAGE=trainer BUMP=minor" in done.stderr


def test_every_command_has_a_target_in_the_makefile() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    commands = run_images("-h").stdout.partition("{")[2].partition("}")[0].split(",")
    assert {"base", "build", "demo", "release"} <= set(commands)
    for command in set(commands) - {"environment"}:
        assert f"images) {command}" in makefile or f"-m images {command}" in makefile
