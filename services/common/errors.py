"""Defines the errors that a user can act on, and the exit code of each.

A message says what is wrong and where, the found and the expected value, and the next command. Any other error is a bug
of Millrace: it keeps its traceback and exits with 1.
"""

from __future__ import annotations

import errno
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.common.input.credentials import mask

MAX_MESSAGE_CHARACTERS = 100_000
"""Most characters of a message, half of them from its begin and half from its end. A name in a damaged file can have
megabytes."""

EXIT_BUG = 1
EXIT_INTERRUPTED = 130

# A file system that answers a write with one of these cannot be written, and a retry cannot help. A failed read is
# explained by its reader, as an `ArtifactError` or a `RecipeError`.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_OCCUPIED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP})
STORAGE_ERRNOS = _FULL | _READ_ONLY | _FORBIDDEN | _OCCUPIED
# A network file system that lost its server for a while answers with one of these, which say nothing about the file.
TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})


class MillraceError(Exception):
    """An error with an exit code. It holds only its message, so that it survives pickling between processes.

    Credentials in the message are masked, because libraries quote addresses as they are.
    """

    exit_code = EXIT_BUG

    def __init__(self, message: str = "") -> None:
        # Ray ends a worker whose error holds a file name that is not UTF-8.
        encodable = str(message).encode("utf-8", "backslashreplace").decode()
        super().__init__(mask(_shorten_at_spaces(encodable)))


def _shorten_at_spaces(message: str) -> str:
    """Cut a message to MAX_MESSAGE_CHARACTERS between words, because the mask cannot recognise half of an address."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{message[:half].rpartition(' ')[0]} [...] {message[-half:].partition(' ')[2]}"


class RecipeError(MillraceError):
    """The recipe or the command line is wrong; a retry cannot help."""

    exit_code = 2


class ArtifactError(MillraceError):
    """An artifact is missing, damaged, or does not fit the recipe or another artifact."""

    exit_code = 3


class UnreadableError(ArtifactError):
    """This user may not read a file of an artifact, which may be intact."""


class DeviceError(MillraceError):
    """A device, a backend or a tool that this machine should have is missing or unfit."""

    exit_code = 4


class LimitError(DeviceError):
    """A limit of this process or of its node is too low for the work; a setting has to change before a retry."""


class StorageError(MillraceError):
    """The file system is full, read-only or not writable for this user."""

    exit_code = 5


class TryAgain(MillraceError):
    """The work stopped at a safe point (preemption, SIGTERM, time limit), and the same command continues it."""

    exit_code = 75


class WorkersLost(TryAgain):
    """A worker process died (killed, out of memory, lost node). The workers can be started again."""


class NoRoomForWorkers(WorkersLost):
    """The running nodes had no room for the workers until the wait was over; the caller does not wait again."""


class AgentsLost(WorkersLost):
    """The agents that start workers on the nodes did not meet, or lost each other."""


class HardwareFault(TryAgain):
    """An accelerator failed. Its host has to be repaired or replaced, and the program is not at fault."""


class Interrupted(MillraceError):
    """The user pressed Ctrl-C; everything committed before stays."""

    exit_code = EXIT_INTERRUPTED


def explain_storage_error(error: OSError, option: str = "--root") -> StorageError:
    """Turn an `OSError` whose errno is in STORAGE_ERRNOS into the message that a user needs. `option` is the command's
    option that chose the place.
    """
    name = error.filename2 or error.filename  # the target of a rename is the place that is taken
    where = Path(str(name)) if name else None
    place = f"{where}: " if where else ""
    free = ""
    for existing in (where, *where.parents) if where else ():
        with suppress(OSError):
            free = f" ({shutil.disk_usage(existing).free:,} bytes free)"
            break
    if error.errno in _FULL:
        advice = (
            f"Free some space or pass another {option}; the same command then continues where it stopped. "
            f"`python -m services.common.artifacts gc DIR` removes what interrupted commands left below the root DIR."
        )
    elif error.errno in _OCCUPIED:
        advice = (
            f"Something else is in the place of a file or folder of Millrace. Move it away, or pass another {option}."
        )
    elif error.errno in _FORBIDDEN:
        advice = (
            f"This user may not write there. Change the owner or the mode, or pass a {option} that this user can write."
        )
    else:
        advice = f"Pass a {option} that this user can write."
    return StorageError(f"{place}{error.strerror}{free}. {advice}")


def print_traceback(error: BaseException | None = None) -> None:
    """Print the traceback of `error`, or of the error being handled, with credentials masked: errors of libraries quote
    addresses as they are.
    """
    lines = traceback.format_exception(error) if error else [traceback.format_exc()]
    with suppress(OSError):  # stderr has no reader
        print(mask("".join(lines)), end="", file=sys.stderr, flush=True)


@contextmanager
def naming_the_place(folder: Path) -> Iterator[None]:
    """Put `folder` into an `OSError` without a file name, such as that of a failed write."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise
