"""Makes folders on this node's disk that belong to this user alone, and removes them with the last command using them.

    <temporary folder>/millrace-<uid>/<name>/        and beside it its lock, <name>.lock

Every process that uses a folder holds its lock shared, so the kernel knows which users are alive. The last one removes
the folder, and the next command on the node removes the folders of killed commands.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import StorageError

# Inductor splits the command line of its C++ compiler as a shell would, and these paths are on it.
_PLAIN_PATH = re.compile(r"[\w./+-]+", re.ASCII)
_PLAIN_FOLDER = Path("/tmp")  # nosec B108 # the folder in it is this user's alone

# The path of a socket ends at 103 bytes on macOS and at 107 on Linux. Ray adds 64 of its own to its folder's, which is
# `/ray-12345678` below the base.
_SHORT_BYTES = 103 - 64 - 13
_OWN_FOLDER = "set TMPDIR to a folder of your own; /tmp is taken for one whose path is long or needs quotes in a shell."


def private_base(is_short: bool = False) -> Path:
    """Make and return the folder of all private folders. Its path needs no quotes; `is_short` leaves room for sockets.

    Raises `StorageError` where another user could change its content, because programs below it are run.
    """
    name = f"millrace-{os.getuid()}"
    base = Path(tempfile.gettempdir()) / name
    if not _PLAIN_PATH.fullmatch(str(base)) or (is_short and len(str(base)) > _SHORT_BYTES):
        base = _PLAIN_FOLDER / name
    try:
        base.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:  # no folder
        pass
    except OSError as error:
        raise StorageError(f"{base}: {error.strerror}. Make it writable, or {_OWN_FOLDER}") from error
    require_private(base)
    base.chmod(0o700)
    return base


def require_private(folder: Path) -> None:
    """Raise `StorageError` unless `folder` is a real folder that belongs to this user and only this user can write."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid != os.getuid():
        problem = f"belongs to user {found.st_uid}, and this is user {os.getuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise StorageError(
        f"{folder} {problem}. Programs that this command runs are kept there, so no other user may change it. Remove "
        f"it, or {_OWN_FOLDER}"
    )


@contextmanager
def private_folder(name: str, is_short: bool = False) -> Iterator[Path]:
    """Make the folder `name` for the block; other processes that name it at the same time share it.

    The last user removes it.
    """
    base = private_base(is_short)
    remove_abandoned(base)
    held = _lock(base / f"{name}.lock", fcntl.LOCK_SH)
    assert held is not None
    try:
        folder = base / name
        folder.mkdir(mode=0o700, exist_ok=True)
        yield folder
    finally:
        os.close(held)
        _remove_unused(base, name)


def remove_abandoned(base: Path) -> None:
    """Remove the folders that no living process uses any more."""
    for lock in base.glob("*.lock"):
        _remove_unused(base, lock.stem)


def new_name(purpose: str) -> str:
    """Return a short and unique name for a folder."""
    return f"{purpose}-{uuid.uuid4().hex[:8]}"


def _remove_unused(base: Path, name: str) -> None:
    held = _lock(base / f"{name}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    if held is None:  # in use
        return
    try:
        shutil.rmtree(base / name, ignore_errors=True)
        if not (base / name).exists():
            (base / f"{name}.lock").unlink(missing_ok=True)
    finally:
        os.close(held)


def _lock(path: Path, operation: int) -> int | None:
    """Lock a file, made if absent; return its descriptor, or None if others hold it and `operation` does not wait."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, operation)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # the file was removed meanwhile
