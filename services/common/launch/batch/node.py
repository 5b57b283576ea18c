"""A node of an AWS Batch job: what the variables say that Batch sets, and what it must have before the stage runs.

https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import itertools
import re
import shutil
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError, StorageError
from services.common.input.files import open_regular_file

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
"""Characters of a packed recipe. AWS Batch takes 24 KiB for a whole job definition (its service quotas)."""
MOST_RECIPE_BYTES = 2**20
"""Bytes of a recipe. A few characters can be packed so that they unfold to gigabytes."""

RECIPES = "recipes"

_DIGITS = re.compile(r"[0-9]{1,6}")  # numbers of nodes and attempts are far smaller; Python reads 4,300 digits at most
_JOB_ID = re.compile(r"[A-Za-z0-9_:-]{1,128}")
_SHOWN_CHARACTERS = 60
_MOST_NODES = 10_000  # ten times as many as a job of Batch may have

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

    Raises `DeviceError` outside of a job, and where a variable has a value that Batch does not set or the variables
    contradict one another.
    """
    # In a job of several nodes each has the job's id and its own index: ID#1.
    job_id = variables.get(JOB_ID, "").partition("#")[0]
    if not _JOB_ID.fullmatch(job_id):
        raise DeviceError(
            f"{_show(variables, JOB_ID)}: this is no container of an AWS Batch job. Elsewhere run the stage's command "
            f"itself, which is what follows after --."
        )
    num_nodes = _count(variables, NUM_NODES, 1, least=1, most=_MOST_NODES)
    lacking = [name for name in (JOB_ATTEMPT, NODE_INDEX, MAIN_INDEX) if not variables.get(name, "").strip()]
    if num_nodes > 1 and lacking:  # each node would take itself for the main one
        raise DeviceError(f"{NUM_NODES}={num_nodes}, and {', '.join(lacking)} is not set. Submit the job again.")
    main_index = _count(variables, MAIN_INDEX, 0)
    index = _count(variables, NODE_INDEX, main_index)
    node = BatchNode(
        job_id, _count(variables, JOB_ATTEMPT, 1, least=1), index, num_nodes, main_index, _read_address(variables)
    )
    if not max(index, main_index) < num_nodes:
        raise DeviceError(
            f"{NODE_INDEX}={index}, {MAIN_INDEX}={main_index}: expected less than {NUM_NODES}={num_nodes}."
        )
    if not node.is_main and not node.main_address:
        raise DeviceError(
            f"{MAIN_ADDRESS} is not set on {node.name}: it cannot find the main node. Submit the job again."
        )
    return node


def _count(variables: Mapping[str, str], name: str, default: int, least: int = 0, most: int = 999_999) -> int:
    text = variables.get(name, "").strip() or str(default)
    if not _DIGITS.fullmatch(text) or not least <= int(text) <= most:
        raise DeviceError(
            f"{_show(variables, name)}: expected a number from {least} to {most:,}, as AWS Batch sets it. Submit the "
            f"job again."
        )
    return int(text)


def _read_address(variables: Mapping[str, str]) -> str:
    """The main node's address, in its usual form; empty where it is not told."""
    text = variables.get(MAIN_ADDRESS, "").strip()
    if not text:
        return ""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:  # also what is no ASCII
        address = ipaddress.IPv4Address(0)
    if address.is_unspecified or address.is_multicast:
        raise DeviceError(
            f"{_show(variables, MAIN_ADDRESS)}: expected the address of a machine, such as 10.0.0.7. Submit the job "
            f"again."
        )
    return str(address)


def _show(variables: Mapping[str, str], name: str) -> str:
    """A variable for a message, which ends although the value may not."""
    text = variables.get(name, "")
    more = f" and {len(text) - _SHOWN_CHARACTERS:,} characters more" if len(text) > _SHOWN_CHARACTERS else ""
    return f"{name}={text[:_SHOWN_CHARACTERS]!a}{more}"


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


def require_program(command: StageCommand) -> None:
    """Raises `RecipeError` where the command's first word is no program of this node."""
    if shutil.which(command.words[0]) is None:
        raise RecipeError(
            f"{command.words[0][:200]!a} is no program here: expected the stage's command after --, such as -- python "
            f"-m services.{command.stage} ..."
        )


def pack_recipe(content: bytes) -> str:
    """The value of RECIPE_VARIABLE. Raises `RecipeError` where it is too long."""
    packed = base64.b64encode(zlib.compress(content, level=9)).decode("ascii")
    if len(packed) > MOST_RECIPE_CHARACTERS or len(content) > MOST_RECIPE_BYTES:
        raise RecipeError(
            f"the recipe has {len(content):,} bytes, packed {len(packed):,}, and a job has room for "
            f"{MOST_RECIPE_BYTES:,}, packed {MOST_RECIPE_CHARACTERS:,}. Leave out comments, or override what differs "
            f"from a shorter one with ARGS="
        )
    return packed


def unpack_recipe(packed: str) -> bytes:
    """The recipe, in UTF-8. Raises `RecipeError` for what `pack_recipe` did not make; never holds more than
    MOST_RECIPE_BYTES of it.
    """
    try:
        if len(packed) > MOST_RECIPE_CHARACTERS:
            raise ValueError(f"{len(packed):,} characters, expected at most {MOST_RECIPE_CHARACTERS:,}")
        unfolding = zlib.decompressobj()
        content = unfolding.decompress(base64.b64decode(packed, validate=True), MOST_RECIPE_BYTES)
        if not unfolding.eof or unfolding.unused_data:
            raise ValueError(f"it ends early, goes on after its end, or has more than {MOST_RECIPE_BYTES:,} bytes")
        content.decode()
    except (binascii.Error, ValueError, zlib.error) as error:
        raise RecipeError(f"{RECIPE_VARIABLE} is no packed recipe ({error}). Submit the job again.") from error
    return content


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
    try:
        is_there = _read_bounded(path) == content
    except OSError:  # what else is in its place is replaced, or named by the error of that
        is_there = False
    if not is_there:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)


def require_recipe(command: StageCommand) -> None:
    """Raises `RecipeError` where a recipe that travelled in the root is not what its name says: its SHA-256."""
    if command.recipe.absolute().parent != command.root.absolute() / RECIPES:
        return
    try:
        digest = hashlib.sha256(_read_bounded(command.recipe)).hexdigest()
    except OSError as error:
        raise RecipeError(
            f"{command.recipe}: {error.strerror}. The command that submits a job writes its recipe there: submit again."
        ) from error
    if digest != command.recipe.stem:
        raise RecipeError(
            f"{command.recipe}: its content has SHA-256 {digest}, so it was changed after the job was submitted, or is "
            f"not all there. Remove it and submit again."
        )


def _read_bounded(path: Path) -> bytes:
    """The first bytes of a regular file: as many as a recipe can have, and one more. Raises `OSError`."""
    with open_regular_file(path) as file:
        return file.read(MOST_RECIPE_BYTES + 1) or b""


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
