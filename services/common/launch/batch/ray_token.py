"""Shares the token of a batch job's Ray: the head writes the secret below the root, and the attempt's nodes read it.

Jobs share a security group, so that one job can reach the Ray of another; without the token that Ray takes no command.
The name of a token's file contains job, attempt and address of the head: a head that was frozen and wakes up during a
later attempt cannot touch the token of its successor, and a head removes only the token that it has written.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    token, name = secrets.token_hex(_BYTES), f"{_prefix(node)}{address}"
    root.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (root / FOLDER).mkdir(mode=0o700)
    with _open_folder(root) as folder:
        _remove_earlier(folder, node)
        _write(folder, name, token)
    try:
        yield token
    finally:
        try:
            _withdraw(root, name, token)
        except (OSError, StorageError) as error:  # the stage's exit code matters more
            say(f"the token {root / FOLDER / name} could not be removed; its Ray ends now: {error}")


def read_token(root: Path, node: BatchNode) -> str | None:
    """Read the token of this node's attempt; None while there is none, or while the file system does not answer.

    Raises `StorageError` where other users can access the folder of tokens or the file, and for a file that is not a
    token.
    """
    try:
        with _open_folder(root) as folder:
            offered = [name for name in _names(folder) if name.startswith(_prefix(node))]
            expected = f"{_prefix(node)}{node.main_address}"
            # The address that Batch gives for the main node may differ from the one that the main node's routes gave.
            name = expected if expected in offered else offered[0] if len(offered) == 1 else ""
            return _read(root, folder, name) if name else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS:
            return None
        raise


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _prefix(node: BatchNode) -> str:
    return f"{node.job_id}.{node.attempt}."


@contextmanager
def _open_folder(root: Path) -> Iterator[int]:
    """Open the folder of tokens as a descriptor, so that the folder that is checked is the one that is used.

    Raises `FileNotFoundError`, and `StorageError` for a folder that is not safe.
    """
    path = root / FOLDER
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StorageError(f"{path}: expected a folder of tokens, found a file or a link. Move it away.") from error
        raise
    try:
        _require_own(path, os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _require_own(path: Path, status: os.stat_result) -> None:
    mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
    if owner != os.geteuid() or mode & _OTHERS:
        raise StorageError(
            f"{path}: owner {owner}, mode {mode:04o}; expected owner {os.geteuid()} and no access for others, because "
            f"the token gives control of this job's Ray. If you made it: chown {os.geteuid()} and chmod go-rwx; "
            f"otherwise move it away."
        )


def _remove_earlier(folder: int, node: BatchNode) -> None:
    own = re.compile(rf"\.?{re.escape(node.job_id)}\.([0-9]{{1,9}})\..*")
    for name in _names(folder):
        found = own.fullmatch(name)
        if found and int(found[1]) < node.attempt:
            with suppress(OSError):  # already removed, or not a file
                os.unlink(name, dir_fd=folder)


def _write(folder: int, name: str, token: str) -> None:
    """Write the token atomically, replacing a file of that name."""
    draft = f".{name}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        try:
            os.write(descriptor, token.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise
    os.fsync(folder)


def _read(root: Path, folder: int, name: str) -> str:
    path = root / FOLDER / name
    try:  # O_NONBLOCK: a pipe without a writer would block
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket
            raise _no_token(path) from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _no_token(path)
        _require_own(path, status)
        content = os.read(file, 4 * _BYTES)
    finally:
        os.close(file)
    if not _TOKEN.fullmatch(content):
        raise _no_token(path)
    return content.decode("ascii")


def _no_token(path: Path) -> StorageError:
    return StorageError(
        f"{path}: expected a token, a file of {2 * _BYTES} hexadecimal digits that the main node writes. Move it "
        f"away; the job's next attempt writes its own."
    )


def _withdraw(root: Path, name: str, token: str) -> None:
    """Remove the file if it contains this token."""
    with suppress(FileNotFoundError), _open_folder(root) as folder:
        if _read(root, folder, name) == token:
            os.unlink(name, dir_fd=folder)
