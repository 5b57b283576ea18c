"""Reads the environment of a node of an AWS Batch job, and checks what the node needs before the stage runs.

https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
"""

from __future__ import annotations

import argparse
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError, StorageError
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe

JOB_ID = "AWS_BATCH_JOB_ID"
JOB_ATTEMPT = "AWS_BATCH_JOB_ATTEMPT"
NUM_NODES = "AWS_BATCH_JOB_NUM_NODES"
NODE_INDEX = "AWS_BATCH_JOB_NODE_INDEX"
MAIN_INDEX = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"

ROOT_MARKER = ".millrace-root"
"""Name of a file that the host makes in the shared file system after mounting it. Where the mount failed, the folder of
the same name is on the host's own disk, and everything written there would be lost with the instance.
"""

RECIPES = "recipes"

# An address for documentation (https://www.rfc-editor.org/rfc/rfc5737): it chooses a route, and nothing is sent.
_ELSEWHERE = ("203.0.113.1", 9)


@dataclass(frozen=True)
class BatchNode:
    """Identifies the job, its attempt, and the node on which this process runs."""

    job_id: str
    attempt: int
    index: int
    num_nodes: int
    main_index: int
    main_address: str
    """Address of the main node; empty on the main node itself, where Batch does not set it."""

    @property
    def is_main(self) -> bool:
        return self.index == self.main_index

    @property
    def name(self) -> str:
        return f"node {self.index} of {self.num_nodes}"


def find_node(variables: Mapping[str, str]) -> BatchNode:
    """Read the node from environment variables; a job of a single container has the job id alone.

    Raises `DeviceError` outside of a job.
    """
    try:
        num_nodes = int(variables.get(NUM_NODES) or 1)
        if num_nodes == 1:
            variables = {JOB_ATTEMPT: "1", NODE_INDEX: "0", MAIN_INDEX: "0", **variables}
        # In a job of several nodes the id ends with the index of the node: ID#1.
        job_id, attempt = variables[JOB_ID].partition("#")[0], int(variables[JOB_ATTEMPT])
        index, main_index = int(variables[NODE_INDEX]), int(variables[MAIN_INDEX])
        address = "" if index == main_index else variables[MAIN_ADDRESS]
    except (KeyError, ValueError) as error:
        raise DeviceError(
            f"not a container of an AWS Batch job, which has AWS_BATCH_JOB_ID and others: {error}. Elsewhere run the "
            f"stage's command, which follows --, directly."
        ) from error
    return BatchNode(job_id, attempt, index, num_nodes, main_index, address)


@dataclass(frozen=True)
class StageCommand:
    """A stage's command, with the parts that a node needs."""

    words: tuple[str, ...]
    stage: str
    recipe: Path
    root: Path


def read_command(words: Sequence[str]) -> StageCommand:
    """Parse `python -m services.<stage> --recipe FILE --root DIR ...`. Raises `RecipeError` for anything else."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("-m", "--recipe", "--root"):
        options.add_argument(name, nargs="?")
    given, _ = options.parse_known_args(words)
    if not (given.m and given.recipe and given.root):
        raise RecipeError(
            f"{' '.join(words) or 'nothing'}: expected the stage's command after --, with --recipe and --root, such as "
            f"-- python -m services.trainer --recipe /fsx/{RECIPES}/<digest>.toml --root /fsx"
        )
    return StageCommand(tuple(words), given.m.removeprefix("services."), Path(given.recipe), Path(given.root))


def require_root(root: Path) -> None:
    """Raise `StorageError` unless ROOT_MARKER is in the root or in a folder above it."""
    place = root.absolute()
    if any((folder / ROOT_MARKER).is_file() for folder in (place, *place.parents)):
        return
    found = "no folder" if not place.is_dir() else "a folder with files" if any(place.iterdir()) else "an empty folder"
    raise StorageError(
        f"{place}: {found}, and no {ROOT_MARKER} there or above it. The host makes that file after it has mounted the "
        f"shared file system, so the file system is not mounted, and everything written here would be lost with the "
        f"instance. Nothing was started. Look for the mount in /var/log/cloud-init-output.log on the host; for a file "
        f"system that was mounted in another way: touch {place / ROOT_MARKER}"
    )


def deliver_recipe(command: StageCommand, variables: Mapping[str, str]) -> None:
    """Write the recipe in RECIPE_VARIABLE, if that is set, to the file that the command reads.

    Raises `RecipeError` where the variable is not a packed recipe, and where the command reads another file.
    """
    packed = variables.get(RECIPE_VARIABLE, "")
    if not packed:
        return
    content = unpack_recipe(packed)
    path = command.root.absolute() / RECIPES / f"{hashlib.sha256(content).hexdigest()}.toml"
    if command.recipe.absolute() != path:
        raise RecipeError(
            f"the recipe of {RECIPE_VARIABLE} belongs in {path}, but the command reads {command.recipe}. Submit the "
            f"job again."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, content)


def find_own_address() -> str:
    """The address at which other nodes reach this one: the source address of packets on the default route.

    Names of interfaces do not show which one that is: with awsvpc a task's interface is one of several. Raises
    `DeviceError` where there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError as error:
            raise DeviceError(
                f"this node has no route to other machines ({error.strerror}), so the job's other nodes cannot reach "
                f"it. A job of several nodes needs a subnet with a route; show the routes: ip route"
            ) from error
        return str(probe.getsockname()[0])
