"""The token of a batch job's Ray: a secret of one attempt's head, which the attempt's other nodes read under the root.

Jobs share a security group, so each could reach the others' Ray; without the token it takes no command. A file's name
has job, attempt and address of the head, so that a head which was frozen and wakes up when a later attempt runs has
nothing in common with its successor, and a head withdraws what it has written itself alone.
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
    """A new token of the head at `address`, which the attempt's other nodes can read for as long as the block lasts.

    Tokens of earlier attempts of the job, whose heads were killed, go: Batch begins an attempt when the one before is
    over. Raises `StorageError` where the folder of tokens is not this user's alone.
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
        except (OSError, StorageError) as error:  # the stage's end is told all the same
            say(f"the token {root / FOLDER / name} could not be removed, and Ray that takes it ends now: {error}")


def read_token(root: Path, node: BatchNode) -> str | None:
    """The token that the head of this node's attempt offers; None while there is none, or while no file system answers.

    Raises `StorageError` for a folder of tokens, or a file in it, that is not this user's alone, and for a file that is
    no token.
    """
    try:
        with _open_folder(root) as folder:
            offered = [name for name in _names(folder) if name.startswith(_prefix(node))]
            told = f"{_prefix(node)}{node.main_address}"
            # Batch tells the main node's address, and that one found its own by its routes: they may differ.
            name = told if told in offered else offered[0] if len(offered) == 1 else ""
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
    """A descriptor, so that what is looked at is also what is used. Raises `FileNotFoundError`, `StorageError`."""
    path = root / FOLDER
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise StorageError(f"{path}: expected a folder of tokens, found something else. Move it away.") from error
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
            f"{path}: of user {owner} with mode {mode:04o}, expected user {os.geteuid()} and nothing for others: who "
            f"has the token commands this job's Ray. Where nobody else put it there: chown {os.geteuid()} and "
            f"chmod go-rwx; else move it away."
        )


def _remove_earlier(folder: int, node: BatchNode) -> None:
    own = re.compile(rf"\.?{re.escape(node.job_id)}\.([0-9]{{1,9}})\..*")
    for name in _names(folder):
        found = own.fullmatch(name)
        if found and int(found[1]) < node.attempt:
            with suppress(OSError):  # gone by now, or something that we did not make
                os.unlink(name, dir_fd=folder)


def _write(folder: int, name: str, token: str) -> None:
    """Whole or not at all, as others see it, in place of whatever has that name."""
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
    try:  # a pipe without a writer would be waited for
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
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
        f"{path}: no token, which is a file of {2 * _BYTES} hexadecimal digits that the main node writes. Move it "
        f"away; the job's next attempt writes its own."
    )


def _withdraw(root: Path, name: str, token: str) -> None:
    """Remove the file if it has this very token."""
    with suppress(FileNotFoundError), _open_folder(root) as folder:
        if _read(root, folder, name) == token:
            os.unlink(name, dir_fd=folder)
