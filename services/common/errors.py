"""The errors a user can act on, and the exit code that each of them becomes.

A message says what is wrong, where, what was found and what was expected, and the next command.
Anything that is not one of these is a bug of ours: it keeps its traceback and exits with 1.
"""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from services.common.stop_signals import Stopped, ignore_stop_signals, install, is_reader_gone, name_signal

logger = logging.getLogger(__name__)

_at_end: list[Callable[[int], None]] = []

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
    """An error with an exit code. Carries its message alone, so that it survives pickling between processes."""

    exit_code = EXIT_BUG


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


class Interrupted(MillraceError):
    """The user pressed Ctrl-C; what was committed before stays."""

    exit_code = EXIT_INTERRUPTED


def explain_storage_error(error: OSError) -> StorageError:
    """Turn an `OSError` whose errno is in STORAGE_ERRNOS into the sentence a user needs."""
    where = Path(str(error.filename)) if error.filename else None
    place = f"{where}: " if where else ""
    free = ""
    for existing in (where, *where.parents) if where else ():
        with suppress(OSError):
            free = f" ({shutil.disk_usage(existing).free:,} bytes free)"
            break
    if error.errno in _FULL:
        advice = "Free some space or pass another --root; the same command then continues where it stopped."
    elif error.errno in _OCCUPIED:
        advice = "Something else is where ours belongs: move it away. Pass a --root that this user can write to."
    elif error.errno in _FORBIDDEN:
        advice = (
            "This user may not do that there: change its owner or mode. Or pass a --root that this user can write to."
        )
    else:
        advice = "Pass a --root that this user can write to."
    return StorageError(f"{place}{error.strerror}{free}. {advice}")


@contextmanager
def naming_the_place(folder: Path) -> Iterator[None]:
    """Let a storage error say where it happened: a failed write, unlike a failed open, does not know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder)
        raise


def run_stage(main: Callable[[list[str]], int]) -> NoReturn:
    """The process edge of every program: run `main(argv)` and leave with the exit code its errors stand for."""
    # A stage that is told to stop while it holds only restartable work ends like one that was preempted.
    # The trainer replaces this by what commits a checkpoint first.
    install(_raise_stopped)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and text of any language, on a terminal of any encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        exit_code = exit_code_of(lambda: main(sys.argv[1:]))
    except Stopped as error:  # while another end was reported
        exit_code = error.exit_code
    install(lambda signum: os._exit(exit_code))  # nothing is left to be stopped
    for leave in _at_end:
        leave(exit_code)
    if exit_code in (TryAgain.exit_code, EXIT_INTERRUPTED):
        # A library's threads may be at work, and then its own end of a process is to abort it.
        atexit._run_exitfuncs()
        with suppress(OSError):  # nobody reads
            sys.stdout.flush()
        os._exit(exit_code)
    ignore_stop_signals()  # Python would restore what they do at the very end
    sys.exit(exit_code)


def call_at_end(leave: Callable[[int], None]) -> None:
    """Let `run_stage` call `leave(exit_code)` when all else is done."""
    _at_end.append(leave)


def exit_code_of(work: Callable[[], int]) -> int:
    """Run `work` and translate what it raises into an exit code and a printed message."""
    try:
        exit_code = work()
        sys.stdout.flush()  # here, where a reader that has gone can be handled
        return exit_code
    except (MillraceError, Stopped) as error:
        return _report(error)
    except KeyboardInterrupt:  # of a program that is no stage
        return _report(Interrupted("Interrupted. Nothing was published half; the same command continues."))
    except BrokenPipeError:
        if not is_reader_gone(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in STORAGE_ERRNOS:
            return _report(explain_storage_error(error))
        if error.errno in TRANSIENT_ERRNOS and not isinstance(error, ConnectionError):
            return _report(
                TryAgain(
                    f"{error.filename or 'the file system'}: {error.strerror}. Look after the mount or the disk; the "
                    f"same command continues from what was committed."
                )
            )
        if error.errno == errno.ENAMETOOLONG:
            return _report(
                RecipeError(f"{error.filename}: {error.strerror}. Pass a shorter path, or shorten the name.")
            )
        raise


def _report(error: MillraceError | Stopped) -> int:
    with suppress(OSError):  # nobody reads
        print(f"millrace: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _raise_stopped(signum: int) -> NoReturn:
    raise Stopped(signum, f"Stopped by {name_signal(signum)} before publishing. The same command continues the work.")
