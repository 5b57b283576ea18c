"""Docker's commands, and a stage in a container of its image."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

IMAGE_USER = 10001  # images/make_user.sh


def docker(*arguments: str, **options: Any) -> str:
    """Standard output of a docker command, which has to succeed."""
    return subprocess.run(
        ["docker", *arguments], stdout=subprocess.PIPE, text=True, check=True, **options
    ).stdout.strip()


def inspect_image(name: str) -> dict[str, Any]:
    return dict(json.loads(docker("image", "inspect", name))[0])


def run_stage(image: str, recipe: Path, root: Path, *options: str) -> None:
    """Run a stage as a cluster does: a read-only root, no network, one scratch folder, no privileges."""
    owner = root.stat()
    docker(
        *("run", "--rm", "--init", "--read-only", "--network", "none", "--user", f"{owner.st_uid}:{owner.st_gid}"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--tmpfs", "/scratch:exec,mode=1777", "--shm-size", "2g"),
        *("--volume", f"{root.resolve()}:/fsx", "--volume", f"{recipe.resolve()}:/recipe.toml:ro"),
        *(image, *options, "--recipe", "/recipe.toml", "--root", "/fsx"),
    )
