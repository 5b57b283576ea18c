"""The errors a user can act on, and the exit code that each of them becomes.

A message says what is wrong, where, what was found and what was expected, and the next command.
Anything that is not one of these is a bug of ours: it keeps its traceback and exits with 1.
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
"""Characters of a message that are shown, half of them from its begin and half from its end: what a file names, such as
an artifact's name, can have megabytes."""

EXIT_BUG = 1
EXIT_INTERRUPTED = 130

# A file system that answers with one of these takes no more of our bytes; retrying cannot help. What cannot be read is
# not meant: who reads a file explains that, as an `ArtifactError` or a `RecipeError`.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_OCCUPIED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP})
STORAGE_ERRNOS = _FULL | _READ_ONLY | _FORBIDDEN | _OCCUPIED
# A network file system that lost its server for a while answers with one of these; they say nothing about the file.
TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})


class MillraceError(Exception):
    """An error with an exit code. Carries its message alone, so that it survives pickling between processes.

    Credentials in the message are masked: what libraries say of an address names it as a whole.
    """

    exit_code = EXIT_BUG

    def __init__(self, message: str = "") -> None:
        super().__init__(mask(_shorten_at_spaces(str(message))))


def _shorten_at_spaces(message: str) -> str:
    """A message of MAX_MESSAGE_CHARACTERS at most. A word that does not fit is left out whole: of half of an address
    nobody can tell that it holds a password.
    """
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    half = MAX_MESSAGE_CHARACTERS // 2
    return f"{message[:half].rpartition(' ')[0]} [...] {message[-half:].partition(' ')[2]}"


class RecipeError(MillraceError):
    """The recipe or the command line is wrong: no retry can help."""

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
    """A limit of this process or of its node is too low for the work: a setting has to change before a retry helps."""


class StorageError(MillraceError):
    """The file system is full, read-only or not writable for this user."""

    exit_code = 5


class TryAgain(MillraceError):
    """The work stopped at a safe point and the same command continues it: preemption, SIGTERM, time limit."""

    exit_code = 75


class WorkersLost(TryAgain):
    """A worker process died (killed, out of memory, lost node). The group can be started again."""


class NoRoomForWorkers(WorkersLost):
    """The nodes that are up could not hold the workers, for as long as that was waited for: do not wait once more."""


class HardwareFault(TryAgain):
    """An accelerator failed: its host has to be repaired or replaced, and nothing of the program has to change."""


class Interrupted(MillraceError):
    """The user pressed Ctrl-C; what was committed before stays."""

    exit_code = EXIT_INTERRUPTED


def explain_storage_error(error: OSError, option: str = "--root") -> StorageError:
    """Turn an `OSError` whose errno is in STORAGE_ERRNOS into the sentence a user needs. `option` is the one of the
    command that chose the place.
    """
    name = error.filename2 or error.filename  # of a rename, the place that is taken
    where = Path(str(name)) if name else None
    place = f"{where}: " if where else ""
    free = ""
    for existing in (where, *where.parents) if where else ():
        with suppress(OSError):
            free = f" ({shutil.disk_usage(existing).free:,} bytes free)"
            break
    if error.errno in _FULL:
        advice = f"Free some space or pass another {option}; the same command then continues where it stopped."
    elif error.errno in _OCCUPIED:
        advice = f"Something else is where ours belongs: move it away. Or pass another {option}."
    elif error.errno in _FORBIDDEN:
        advice = (
            f"This user may not do that there: change its owner or mode. Or pass a {option} that this user can write "
            f"to."
        )
    else:
        advice = f"Pass a {option} that this user can write to."
    return StorageError(f"{place}{error.strerror}{free}. {advice}")


def print_traceback(error: BaseException | None = None) -> None:
    """Print the traceback of `error`, or of what is being handled, with its credentials masked: a chain of errors ends
    in a library's, which may name an address as a whole.
    """
    lines = traceback.format_exception(error) if error else [traceback.format_exc()]
    with suppress(OSError):  # nobody reads
        print(mask("".join(lines)), end="", file=sys.stderr, flush=True)


@contextmanager
def naming_the_place(folder: Path) -> Iterator[None]:
    """Let a storage error say where it happened: a failed write, unlike a failed open, does not know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise
