"""Runs a program and turns its errors and stop signals into an exit code and a message."""

from __future__ import annotations

import atexit
import errno
import gc
import getpass
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from services.common.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    TRANSIENT_ERRNOS,
    ArtifactError,
    Interrupted,
    LimitError,
    MillraceError,
    RecipeError,
    StorageError,
    TryAgain,
    shell_command,
)
from services.common.hardware.faults import find_hardware_fault
from services.common.process.shutdown import (
    Stopped,
    end_at_once,
    forget_stops,
    ignore_stop_signals,
    install,
    is_reader_gone,
    name_signal,
    on_stop_signal,
    raise_stopped,
    stop_behind,
)

COMMAND_VARIABLE = "MILLRACE_COMMAND"
"""Variable with the command line of `millrace` that has started this program."""
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PLACE_ERRNOS = {
    *(errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP),
}
"""Errors of a place that this user cannot write, or that is taken by a file of another type."""
_LIMIT_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
_PATH_ERRNOS = {errno.ENOENT, errno.ENAMETOOLONG, errno.ENXIO}
_PARSE_ERRORS = {"ArrowInvalid", "JSONDecodeError", "TOMLDecodeError", "SafetensorError"}
"""Names of the errors with which libraries refuse the content of a file. Few programs import these libraries."""

_at_end: list[Callable[[int], None]] = []


def run_program(main: Callable[[list[str]], int], service: str = "") -> NoReturn:
    """Run `main(argv)` and exit with the code of its error, or 0. `service` is the one that `--version` tells of."""
    # The trainer replaces this handler by one that first commits a checkpoint.
    install(_raise_stopped)
    _name_user()
    argv = sys.argv[1:]
    atexit.register(ignore_stop_signals)  # called among the last: Python restores the handlers at the very end
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and text of any language, on a terminal of any encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        exit_code = exit_code_of(lambda: run_main(main, argv, service))
    except Stopped as error:  # a signal that came while another error was reported
        exit_code = error.exit_code
    install(lambda signum: os._exit(exit_code))  # nothing is left to be stopped
    for leave in _at_end:
        leave(exit_code)
    if exit_code in (TryAgain.exit_code, EXIT_INTERRUPTED):
        # A library's threads may be at work, and then its own end of a process is to abort it.
        atexit._run_exitfuncs()
        with suppress(OSError):  # stdout has no reader
            sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _name_user() -> None:
    """Set USER and HOME for libraries where the system knows neither, as of `docker run --user 12345`."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["USER"] = str(os.getuid())
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"  # as container engines do


@contextmanager
def importing() -> Iterator[None]:
    """Guard the imports of a stage's program, which take seconds: a stop signal ends the process immediately, because
    libraries catch every error of an optional import. The search for garbage would take a quarter of their time."""
    gc.disable()
    try:
        with on_stop_signal(end_at_once):
            yield
    finally:
        gc.freeze()  # modules stay, so later collections need not search them
        gc.enable()


def run_main(main: Callable[[list[str]], int], argv: list[str], service: str = "") -> int:
    """Run `main(argv)`, or print the version where the last word is `--version`: of the service, or of all here."""
    if argv[-1:] == ["--version"]:
        from services.common.version import describe_version  # noqa: PLC0415 - an image's first layer has not all files

        print(describe_version(service))
        return 0
    return main(argv)


def call_at_end(leave: Callable[[int], None]) -> None:
    """Let `run_program` call `leave(exit_code)` at the very end."""
    _at_end.append(leave)


def exit_code_of(work: Callable[[], int]) -> int:
    """Run `work`, and return the code that it returned, or that of its error once the message is printed.

    An error that nobody can act on is a bug, and rises with its traceback.
    """
    forget_stops()
    try:
        exit_code = work()
        sys.stdout.flush()  # here, where the `BrokenPipeError` of a reader that has gone is handled
        return exit_code
    except BrokenPipeError:
        if not is_reader_gone(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt, Stopped) as error:
        told = to_user_error(stop_behind(error))
        if told is None:
            raise
        with suppress(OSError):  # stderr has no reader
            print(f"millrace: {told}", file=sys.stderr, flush=True)
        return told.exit_code


def exit_code_for(error: BaseException) -> int:
    """Return the exit code with which `run_program` ends after an error."""
    told = to_user_error(error)
    return told.exit_code if told else EXIT_BUG


def to_user_error(error: BaseException) -> MillraceError | Stopped | None:
    """Return the error that a user can act on, which has an exit code; None for a bug."""
    if isinstance(error, MillraceError | Stopped):
        return error
    if isinstance(error, KeyboardInterrupt):  # a program that is not a stage has Python's own handler
        return Interrupted("Interrupted. Nothing is half published; the same command continues.")
    if isinstance(error, MemoryError):
        return LimitError(
            f"out of memory: {error or 'an allocation failed'}. Use more memory, or fewer workers a node."
        )
    if isinstance(error, OSError):
        return _of_os_error(error)
    if type(error).__name__ in _PARSE_ERRORS:
        return ArtifactError(f"a file cannot be parsed: {type(error).__name__}: {error}")
    return find_hardware_fault(error) if isinstance(error, RuntimeError) else None


def _of_os_error(error: OSError) -> MillraceError | None:
    """Return the error that a user can act on, by errno; None for others, such as those of a network."""
    name = error.filename2 or error.filename  # the target of a rename is the place that is taken
    place = f"{name or 'the file system'}: {error.strerror}"
    if error.errno in _FULL_ERRNOS:
        return StorageError(
            f"{place}. Free space there; the same command then continues. "
            f"`{shell_command('services.common.artifacts', 'gc')} ROOT` removes what interrupted commands left there."
        )
    if error.errno in _PLACE_ERRNOS:
        return StorageError(
            f"{place}. Move the file at that path, let this user write there, or pass another --root; the same "
            f"command then continues."
        )
    if error.errno in TRANSIENT_ERRNOS and not isinstance(error, ConnectionError):
        return TryAgain(f"{place}. Repair the mount or the disk; the same command continues what was committed.")
    if error.errno in _LIMIT_ERRNOS:
        return LimitError(f"{place}. Raise the limit of this process or its node (ulimit -a), and run again.")
    if error.errno in _PATH_ERRNOS and name:
        return RecipeError(f"{place}. Pass another path.")
    return None


def _raise_stopped(signum: int) -> NoReturn:
    raise_stopped(signum, f"Stopped by {name_signal(signum)} before publishing. The same command continues the work.")
