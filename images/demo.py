"""Runs the demo with each stage in its own container: one recipe, one shared folder, no network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from images.build import repository_of
from images.docker import inspect_image, require_engine
from images.platforms import STAGES_WITH_PROGRAM
from images.versions import describe_build
from services.common.errors import MillraceError, RecipeError

STAGES = ("tokenizer", "compiler", "trainer")
IMAGE_USER = 10001


class StageFailed(MillraceError):
    """A stage's container failed. This command ends with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_stages(stages: tuple[str, ...], variant: str, recipe: Path, root: Path, options: list[str]) -> None:
    """Run the stages one after the other, each in its image, with `root` mounted as the artifact root.

    The images are those of the working tree, unless TOKENIZER_TAG, COMPILER_TAG or TRAINER_TAG name another tag.
    Raises `StageFailed` for the first stage that fails, and `DeviceError` for an image that is not on this machine.
    """
    require_engine()
    if not recipe.is_file():  # Docker would make a folder of this name
        raise RecipeError(f"RECIPE is {recipe}, which is not a file. The folder recipes/ has the shipped ones.")
    images = {}
    for stage in stages:
        tag = os.environ.get(f"{stage.upper()}_TAG") or describe_build(stage, variant).commit_tag
        images[stage] = f"{repository_of(stage)}:{tag}"
        inspect_image(images[stage])
    if not root.exists():
        root.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(root, IMAGE_USER, IMAGE_USER)
    for stage, image in images.items():
        print(f"\n== {stage}: {image}", flush=True)
        gpus = ("--gpus", "all") if variant == "cuda" and stage in STAGES_WITH_PROGRAM else ()
        _run_container(stage, image, recipe, root, options, gpus)
    if "trainer" in stages:
        _run_container("trainer", images["trainer"], recipe, root, ["summary", *options])


def _run_container(
    stage: str, image: str, recipe: Path, root: Path, arguments: list[str], devices: tuple[str, ...] = ()
) -> None:
    """Run a container as a cluster does: a read-only root, no network, one scratch folder, no privileges."""
    owner = root.stat()
    command = [
        *("docker", "run", "--rm", "--init", "--read-only", "--network", "none"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", f"{owner.st_uid}:{owner.st_gid}"),
        *devices,
        # exec, because compiled graphs are loaded from /scratch as shared libraries. Docker's default for /dev/shm is
        # 64 MB, and Ray needs more.
        *("--tmpfs", "/scratch:exec,mode=1777", "--shm-size", "2g"),
        *("--volume", f"{root.resolve()}:/fsx", "--volume", f"{recipe.resolve()}:/recipe.toml:ro"),
        *(image, *arguments, "--recipe", "/recipe.toml", "--root", "/fsx"),
    ]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise StageFailed(f"the {stage} container ended with exit code {code}; its message is above.", code)
