"""Reads the environment of a node of an AWS Batch job, and checks what the node needs before the stage runs.

https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import re
import shutil
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

_JOB_ID = re.compile(r"[A-Za-z0-9_:-]{1,128}")
_MAX_NUMBER = 10_000  # ten times the limit of AWS Batch on nodes

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

    Raises `DeviceError` outside of a job, and for values that Batch does not set.
    """
    # In a job of several nodes the id ends with the index of the node: ID#1.
    job_id = variables.get(JOB_ID, "").partition("#")[0]
    if not _JOB_ID.fullmatch(job_id):
        raise DeviceError(
            f"{JOB_ID}={job_id!a}: expected the id of an AWS Batch job, so this is not a container of one. Elsewhere "
            f"run the stage's command, which follows --, directly."
        )
    num_nodes = _read_number(variables, NUM_NODES, "1", least=1)
    is_alone = num_nodes == 1  # of several nodes without an index, each would act as the main node
    attempt = _read_number(variables, JOB_ATTEMPT, "1" if is_alone else "", least=1)
    index, main_index = (
        _read_number(variables, name, "0" if is_alone else "", most=num_nodes - 1) for name in (NODE_INDEX, MAIN_INDEX)
    )
    address = "" if index == main_index else _read_address(variables)
    return BatchNode(job_id, attempt, index, num_nodes, main_index, address)


def _read_number(variables: Mapping[str, str], name: str, default: str, least: int = 0, most: int = _MAX_NUMBER) -> int:
    text = variables.get(name, "").strip() or default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise DeviceError(
            f"{name}={text!a}: expected a number from {least} to {most:,}, as AWS Batch sets it. Submit the job again."
        )
    return int(text)


def _read_address(variables: Mapping[str, str]) -> str:
    """The main node's address in canonical form."""
    text = variables.get(MAIN_ADDRESS, "").strip()
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        address = ipaddress.IPv4Address(0)
    if address.is_unspecified:
        raise DeviceError(
            f"{MAIN_ADDRESS}={text!a}: expected the main node's IPv4 address, such as 10.0.0.7. Submit the job again."
        )
    return str(address)


@dataclass(frozen=True)
class StageCommand:
    """A stage's command, with the parts that a node needs."""

    words: tuple[str, ...]
    stage: str
    recipe: Path
    root: Path


def read_command(words: Sequence[str]) -> StageCommand:
    """Parse `python -m services.<stage> --recipe FILE --root DIR ...`. Raises `RecipeError` for anything else."""
    stages = [word.removeprefix("services.") for flag, word in itertools.pairwise(words) if flag == "-m"]
    recipe, root = _option(words, "--recipe"), _option(words, "--root")
    if not stages or not recipe or not root:
        raise RecipeError(
            f"{' '.join(words) or 'nothing'}: expected the stage's command after --, with --recipe and --root, such as "
            f"-- python -m services.trainer --recipe /fsx/{RECIPES}/<digest>.toml --root /fsx"
        )
    return StageCommand(tuple(words), stages[0], Path(recipe), Path(root))


def _option(words: Sequence[str], name: str) -> str:
    """The value of an option, of which the last one counts; empty where the option is not given."""
    values = [
        words[at + 1] if word == name else word.removeprefix(f"{name}=")
        for at, word in enumerate(words)
        if word.startswith(f"{name}=") or (word == name and at + 1 < len(words))
    ]
    return values[-1] if values else ""


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


def require_program(command: StageCommand) -> None:
    """Raise `RecipeError` where the command's first word is not a program on this node."""
    if shutil.which(command.words[0]) is None:
        raise RecipeError(
            f"{command.words[0]!a} is not a program on this node: expected the stage's command after --, such as "
            f"-- python -m services.{command.stage} ..."
        )


def deliver_recipe(command: StageCommand, variables: Mapping[str, str]) -> None:
    """Write the recipe in RECIPE_VARIABLE, if that is set, to the file that the command reads, if the file lacks it.

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
    try:
        is_there = path.read_bytes() == content
    except OSError:  # the write replaces what is at this path, or its error names the path
        is_there = False
    if not is_there:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)


def require_recipe(command: StageCommand) -> None:
    """Raise `RecipeError` where a recipe below the root does not have the SHA-256 of its file name."""
    if command.recipe.absolute().parent != command.root.absolute() / RECIPES:
        return
    try:
        digest = hashlib.sha256(command.recipe.read_bytes()).hexdigest()
    except OSError as error:
        raise RecipeError(
            f"{command.recipe}: {error.strerror}. The command that submits a job provides this recipe: submit again."
        ) from error
    if digest != command.recipe.stem:
        raise RecipeError(
            f"{command.recipe}: the content has SHA-256 {digest}, so the file is incomplete or was changed after the "
            f"job was submitted. Remove it and submit again."
        )


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
