"""A node of an AWS Batch job: what the variables say that Batch sets, and what it must have before the stage runs.

https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import os
import re
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError, StorageError

JOB_ID = "AWS_BATCH_JOB_ID"
JOB_ATTEMPT = "AWS_BATCH_JOB_ATTEMPT"
NUM_NODES = "AWS_BATCH_JOB_NUM_NODES"
NODE_INDEX = "AWS_BATCH_JOB_NODE_INDEX"
MAIN_INDEX = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"

ROOT_MARKER = ".millrace-root"
"""A file in the shared file system, which the host makes once it has mounted it: where a mount failed there is a folder
of the same name on the host's own disk, which takes every write and loses it with the instance."""

RECIPE_VARIABLE = "MILLRACE_RECIPE"
"""The recipe as it travels in a job: who submits one does not reach the file system."""
MOST_RECIPE_CHARACTERS = 16_384
"""Of it. AWS Batch takes 24 KiB for a whole job definition (its service quotas)."""

RECIPES = "recipes"
RAY_TOKENS = "ray-tokens"

# Nothing that this listens on, so nothing is sent: https://www.rfc-editor.org/rfc/rfc5737
_ELSEWHERE = ("203.0.113.1", 9)


@dataclass(frozen=True)
class BatchNode:
    """Which node of which job this process runs on."""

    job_id: str
    attempt: int
    index: int
    num_nodes: int
    main_index: int
    main_address: str
    """Empty on the main node, to which Batch does not tell it."""

    @property
    def is_main(self) -> bool:
        return self.index == self.main_index

    @property
    def name(self) -> str:
        return f"node {self.index} of {self.num_nodes}"


def find_node(variables: Mapping[str, str]) -> BatchNode:
    """The node of these variables; a job of a single container has none but the job's id.

    Raises `DeviceError` outside of a job, and where the variables contradict one another.
    """
    # In a job of several nodes each has the job's id and its own index: ID#1.
    job_id = variables.get(JOB_ID, "").partition("#")[0]
    if not re.fullmatch(r"[\w:-]+", job_id, re.ASCII):
        raise DeviceError(
            f"{JOB_ID}={variables.get(JOB_ID, '')!r}: this is no container of an AWS Batch job. Elsewhere run the "
            f"stage's command itself, which is what follows after --."
        )
    num_nodes, main_index = _count(variables, NUM_NODES, 1), _count(variables, MAIN_INDEX, 0)
    index = _count(variables, NODE_INDEX, main_index)
    address = variables.get(MAIN_ADDRESS, "")
    node = BatchNode(job_id, _count(variables, JOB_ATTEMPT, 1), index, num_nodes, main_index, address)
    if not max(index, main_index) < num_nodes:
        raise DeviceError(
            f"{NODE_INDEX}={index}, {MAIN_INDEX}={main_index}: expected less than {NUM_NODES}={num_nodes}."
        )
    if not node.is_main and not address:
        raise DeviceError(
            f"{MAIN_ADDRESS} is not set on {node.name}: it cannot find the main node. Submit the job again."
        )
    return node


def _count(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit()):
        raise DeviceError(f"{name}={text!r}: expected a number, as AWS Batch sets it. Submit the job again.")
    return int(text)


@dataclass(frozen=True)
class StageCommand:
    """The command that every target runs, and what of it a node has to know."""

    words: tuple[str, ...]
    stage: str
    recipe: Path
    root: Path


def read_command(words: Sequence[str]) -> StageCommand:
    """Of `python -m services.<stage> --recipe FILE --root DIR ...`. Raises `RecipeError` for anything else."""
    stages = [word.removeprefix("services.") for flag, word in itertools.pairwise(words) if flag == "-m"]
    recipe, root = _option(words, "--recipe"), _option(words, "--root")
    if not stages or not recipe or not root:
        raise RecipeError(
            f"{' '.join(words) or 'nothing'}: expected the stage's command after --, with recipe and root, such as "
            f"-- python -m services.trainer --recipe /fsx/{RECIPES}/<digest>.toml --root /fsx"
        )
    return StageCommand(tuple(words), stages[0], Path(recipe), Path(root))


def _option(words: Sequence[str], name: str) -> str:
    """The value of an option, the last of several as for argparse; empty without it."""
    values = [
        words[at + 1] if word == name else word.removeprefix(f"{name}=")
        for at, word in enumerate(words)
        if word.startswith(f"{name}=") or (word == name and at + 1 < len(words))
    ]
    return values[-1] if values else ""


def require_root(root: Path) -> None:
    """Raises `StorageError` unless the root is in a file system that has ROOT_MARKER."""
    place = root.absolute()
    if any((folder / ROOT_MARKER).is_file() for folder in (place, *place.parents)):
        return
    found = "an empty folder" if place.is_dir() and not any(place.iterdir()) else "no file system with that file"
    raise StorageError(
        f"{place}: no {ROOT_MARKER} there or above it, but {found if place.is_dir() else 'no folder'}. The host makes "
        f"that file in the shared file system once it is mounted, so it is not mounted, and what is written here would "
        f"be lost with the instance. Nothing was started. Look at /var/log/cloud-init-output.log on the host for its "
        f"mount; for a file system that is mounted otherwise: touch {place / ROOT_MARKER}"
    )


def pack_recipe(content: bytes) -> str:
    """The value of RECIPE_VARIABLE. Raises `RecipeError` where it is too long."""
    packed = base64.b64encode(zlib.compress(content, level=9)).decode("ascii")
    if len(packed) > MOST_RECIPE_CHARACTERS:
        raise RecipeError(
            f"the recipe has {len(content):,} bytes, packed {len(packed):,}, and a job has room for "
            f"{MOST_RECIPE_CHARACTERS:,}. Leave out comments, or override what differs from a shorter one with ARGS="
        )
    return packed


def unpack_recipe(packed: str) -> bytes:
    """Raises `RecipeError` for what `pack_recipe` did not make."""
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True))
    except (binascii.Error, ValueError, zlib.error) as error:
        raise RecipeError(f"{RECIPE_VARIABLE} is no packed recipe ({error}). Submit the job again.") from error


def deliver_recipe(command: StageCommand, variables: Mapping[str, str]) -> None:
    """Write the recipe that travelled in the job to where the command reads it; nothing where none did, or it is there.

    Raises `RecipeError` for what is no packed recipe, and where the command reads another file.
    """
    packed = variables.get(RECIPE_VARIABLE, "")
    if not packed:
        return
    content = unpack_recipe(packed)
    path = command.root.absolute() / RECIPES / f"{hashlib.sha256(content).hexdigest()}.toml"
    if command.recipe.absolute() != path:
        raise RecipeError(f"the recipe of {RECIPE_VARIABLE} is {path}, and the command reads {command.recipe}.")
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)


def require_recipe(command: StageCommand) -> None:
    """Raises `RecipeError` where a recipe that travelled in the root is not what its name says: its SHA-256."""
    if command.recipe.absolute().parent != command.root.absolute() / RECIPES:
        return
    try:
        digest = hashlib.sha256(command.recipe.read_bytes()).hexdigest()
    except OSError as error:
        raise RecipeError(
            f"{command.recipe}: {error.strerror}. The command that submits a job writes its recipe there: submit again."
        ) from error
    if digest != command.recipe.stem:
        raise RecipeError(
            f"{command.recipe}: its content has SHA-256 {digest}, so it was changed after the job was submitted, or is "
            f"not all there. Remove it and submit again."
        )


def find_own_address() -> str:
    """The address by which other nodes reach this one: what packets over the default route have as their source.

    An interface's name says nothing: a task's own (awsvpc) comes beside others. Raises `DeviceError` without a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError as error:
            raise DeviceError(
                f"this node has no route to other machines ({error.strerror}), so the job's nodes cannot reach it. A "
                f"job of several nodes needs a subnet with a route: ip route"
            ) from error
        return str(probe.getsockname()[0])


def _token_path(root: Path, node: BatchNode) -> Path:
    return root / RAY_TOKENS / node.job_id


def offer_token(root: Path, node: BatchNode) -> str:
    """A new secret of this attempt, without which Ray takes no command from anybody, in a file for this user alone.

    Jobs share a security group, so each could reach the others' Ray.
    """
    token = secrets.token_hex(32)
    path = _token_path(root, node)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    previous = os.umask(0o077)
    try:
        write_durably(path, token.encode())
    finally:
        os.umask(previous)
    return token


def read_token(root: Path, node: BatchNode) -> str | None:
    """What the main node offers; None while there is nothing."""
    try:
        return _token_path(root, node).read_text(encoding="ascii").strip() or None
    except FileNotFoundError:
        return None


def withdraw_token(root: Path, node: BatchNode) -> None:
    _token_path(root, node).unlink(missing_ok=True)
