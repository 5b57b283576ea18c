"""Shares the token of a batch job's Ray: the head writes the secret below the root, and the attempt's nodes read it.

Jobs share a security group, so that one job can reach the Ray of another; without the token that Ray takes no command.
The name of a token's file contains job, attempt and address of the head, so that no head touches another's token.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from services.common.errors import TRANSIENT_ERRNOS, StorageError
from services.common.launch.batch.node import BatchNode

FOLDER = "ray-tokens"
_BYTES = 32
_TOKEN = re.compile(rb"[0-9a-f]{%d}" % (2 * _BYTES))
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def offering_token(root: Path, node: BatchNode, address: str, say: Callable[[str], None]) -> Iterator[str]:
    """Write a new token of the head at `address`, which the attempt's other nodes can read until the block ends.

    Removes tokens of the job's earlier attempts, which have ended: Batch runs one attempt at a time. Raises
    `StorageError` where other users can access the folder of tokens.
    """
    token, path = secrets.token_hex(_BYTES), root / FOLDER / f"{_prefix(node)}{address}"
    root.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _require_own(path.parent)
    _remove_earlier(path.parent, node)
    _write(path, token)
    try:
        yield token
    finally:
        try:
            _require_own(path.parent)
            path.unlink(missing_ok=True)
        except (OSError, StorageError) as error:  # the stage's exit code matters more
            say(f"the token {path} could not be removed; its Ray ends now: {error}")


def read_token(root: Path, node: BatchNode) -> str | None:
    """Read the token of this node's attempt; None while there is none, or while the file system does not answer.

    Raises `StorageError` where other users can access the folder of tokens or the file, and for a file that is not a
    token.
    """
    folder = root / FOLDER
    try:
        _require_own(folder)
        offered = [path for path in folder.iterdir() if path.name.startswith(_prefix(node))]
        # The address that Batch gives for the main node may differ from the one that the main node's routes gave.
        expected = folder / f"{_prefix(node)}{node.main_address}"
        path = expected if expected in offered or len(offered) != 1 else offered[0]
        _require_own(path)
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS:
            return None
        raise
    if not _TOKEN.fullmatch(content):
        raise StorageError(
            f"{path}: expected a token, a file of {2 * _BYTES} hexadecimal digits that the main node writes. Move it "
            f"away; the job's next attempt writes its own."
        )
    return content.decode("ascii")


def _prefix(node: BatchNode) -> str:
    return f"{node.job_id}.{node.attempt}."


def _require_own(path: Path) -> None:
    status = path.stat()
    mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
    if owner != os.geteuid() or mode & _OTHERS:
        raise StorageError(
            f"{path}: owner {owner}, mode {mode:04o}; expected owner {os.geteuid()} and no access for others, because "
            f"the token gives control of this job's Ray. If you made it: chown {os.geteuid()} and chmod go-rwx; "
            f"otherwise move it away."
        )


def _remove_earlier(folder: Path, node: BatchNode) -> None:
    own = re.compile(rf"\.?{re.escape(node.job_id)}\.([0-9]+)\..*")
    for path in folder.iterdir():
        if (found := own.fullmatch(path.name)) and int(found[1]) < node.attempt:
            with suppress(OSError):  # already removed
                path.unlink()


def _write(path: Path, token: str) -> None:
    """Write the token atomically, for this user alone, replacing a file of that name."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "x", encoding="ascii", opener=partial(os.open, mode=0o600)) as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
