"""Defines the errors that a user can act on, and the exit code of each.

A message says what is wrong and where, the found and the expected value, and the next command. Any other error is a bug
of Millrace: it keeps its traceback and exits with 1.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_BUG = 1
EXIT_INTERRUPTED = 130

TRANSIENT_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN})
"""What a network file system that lost its server for a while answers, which says nothing about the file."""
# Neither does a lack of descriptors or memory.
_SAYS_NOTHING_OF_FILE = TRANSIENT_ERRNOS - {errno.EIO} | {errno.EHOSTDOWN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class MillraceError(Exception):
    """An error with an exit code. It holds only its message, so that it survives pickling between processes."""

    exit_code = EXIT_BUG


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


def shell_command(module: str, subcommand: str, recipe: str = "") -> str:
    """Return the start of a command, as a message advises it: `millrace train RECIPE` or `millrace runs`.

    It is `python -m services.trainer train --recipe RECIPE` where `millrace` is not beside this Python, as in images.
    """
    if not (module.startswith("services.") and Path(sys.executable).with_name("millrace").is_file()):
        return f"python -m {module} {subcommand}" + (f" --recipe {recipe}" if recipe else "")
    if module == "services.common.artifacts":
        return f"millrace artifacts {subcommand}"
    return f"millrace {subcommand} {recipe}".rstrip()


def unreadable(path: Path | str, error: OSError) -> MillraceError:
    """Return the error to raise for a file of an artifact that could not be read.

    A missing permission, a network file system that does not answer, and a lack of descriptors are not damage.
    """
    if error.errno in _SAYS_NOTHING_OF_FILE:
        return TryAgain(f"{path}: cannot be read now: {error.strerror}. The same command tries again.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UnreadableError(f"{path}: cannot be read: {error.strerror}. Let this user read it.")
    return ArtifactError(f"{path}: cannot be read: {error.strerror or error}.")


def is_damage(error: MillraceError) -> bool:
    """Tell whether an error means that bytes are wrong, and not that they could not be read."""
    return isinstance(error, ArtifactError) and not isinstance(error, UnreadableError)


@contextmanager
def adding_path(folder: Path) -> Iterator[None]:
    """Put `folder` into an `OSError` without a file name, such as that of a failed write."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise
