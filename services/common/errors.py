"""The errors a user can act on, and the exit code that each of them becomes.

A message says what is wrong, where, what was found and what was expected, and the next command.
Anything that is not one of these is a bug of ours: it keeps its traceback and exits with 1.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

logger = logging.getLogger(__name__)

EXIT_BUG = 1
EXIT_INTERRUPTED = 130

# A file system that answers with one of these takes no more of our bytes; retrying cannot help. What cannot be read is
# not meant: who reads a file explains that, as an `ArtifactError` or a `RecipeError`.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_OCCUPIED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP})
STORAGE_ERRNOS = _FULL | _READ_ONLY | _FORBIDDEN | _OCCUPIED


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
    # The trainer replaces this handler by one that commits a checkpoint first.
    signal.signal(signal.SIGTERM, _raise_terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # names and text of any language, on a terminal of any encoding
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))


@contextmanager
def ending_at_once_on_sigterm() -> Iterator[None]:
    """For imports that take seconds. What the usual handler raises would be swallowed there: libraries catch every
    error of an import that they can do without.
    """
    handler = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def exit_code_of(work: Callable[[], int]) -> int:
    """Run `work` and translate what it raises into an exit code and a printed message."""
    try:
        exit_code = work()
        sys.stdout.flush()  # here, where a reader that has gone can be handled
        return exit_code
    except MillraceError as error:
        return _report(error)
    except KeyboardInterrupt:
        return _report(Interrupted("Interrupted. Nothing was published half; the same command continues."))
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in STORAGE_ERRNOS:
            return _report(explain_storage_error(error))
        if error.errno == errno.ENAMETOOLONG:
            return _report(
                RecipeError(f"{error.filename}: {error.strerror}. Pass a shorter path, or shorten the name.")
            )
        raise


def _is_reader_gone() -> bool:
    """Does nobody read our output any more, as in `... | head`? A pipe to a process of ours breaks too, by a bug."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _report(error: MillraceError) -> int:
    print(f"millrace: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _raise_terminated(signum: int, frame: object) -> NoReturn:
    raise TryAgain("Stopped by SIGTERM before publishing. The same command continues the work.")


def _end_at_once(signum: int, frame: object) -> NoReturn:
    os.write(2, b"millrace: Stopped by SIGTERM before any work. The same command begins it.\n")
    os._exit(TryAgain.exit_code)
