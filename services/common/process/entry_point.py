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
    STORAGE_ERRNOS,
    TRANSIENT_ERRNOS,
    ArtifactError,
    Interrupted,
    LimitError,
    MillraceError,
    RecipeError,
    TryAgain,
    explain_storage_error,
)
from services.common.hardware.faults import explain_hardware_fault
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

_PATH_ERRNOS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO}
)
_LIMIT_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
_PARSE_ERRORS = frozenset({"ArrowInvalid", "JSONDecodeError", "TOMLDecodeError", "SafetensorError"})
"""Names of the errors with which libraries refuse the content of a file. Few programs import these libraries."""

_at_end: list[Callable[[int], None]] = []


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Run `main(argv)` and exit with the code of its error, or 0."""
    # A stage that gets a stop signal before it has work to lose ends like a preempted one. The trainer replaces this
    # handler by one that first commits a checkpoint.
    install(_raise_stopped)
    _name_user()
    argv = sys.argv[1:]
    atexit.register(ignore_stop_signals)  # called among the last: Python restores the handlers at the very end
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and text of any language, on a terminal of any encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        exit_code = exit_code_of(lambda: main(argv))
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
    libraries catch every error of an optional import. No garbage is collected, because imports make none, and the
    search for it takes a quarter of their time.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with on_stop_signal(end_at_once):
            yield
    finally:
        gc.freeze()  # modules stay, so later collections need not search them
        if is_collecting:
            gc.enable()


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
        explained = explain(stop_behind(error))
        if explained is None:
            raise
        with suppress(OSError):  # stderr has no reader
            print(f"millrace: {explained}", file=sys.stderr, flush=True)
        return explained.exit_code


def exit_code_for(error: BaseException) -> int:
    """Return the exit code with which `run_program` ends after an error."""
    explained = explain(error)
    return explained.exit_code if explained else EXIT_BUG


def explain(error: BaseException) -> MillraceError | Stopped | None:
    """Return what to tell the user about an error, with its exit code; None for a bug."""
    if isinstance(error, MillraceError | Stopped):
        return error
    if isinstance(error, KeyboardInterrupt):  # a program that is not a stage has Python's own handler
        return Interrupted("Interrupted. Nothing is half published; the same command continues.")
    if isinstance(error, MemoryError):
        return LimitError(
            f"out of memory: {error or 'an allocation failed'}. Use more memory, or fewer workers a node."
        )
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if type(error).__name__ in _PARSE_ERRORS:
        return ArtifactError(f"a file cannot be parsed: {type(error).__name__}: {error}")
    return explain_hardware_fault(error) if isinstance(error, RuntimeError) else None


def _explain_os_error(error: OSError) -> MillraceError | None:
    """Return the error that a user can act on, by errno; None for others, such as those of a network."""
    where, why = error.filename or "the file system", error.strerror
    if error.errno in STORAGE_ERRNOS:
        return explain_storage_error(error)
    if error.errno in TRANSIENT_ERRNOS and not isinstance(error, ConnectionError):
        return TryAgain(f"{where}: {why}. Repair the mount or the disk; the same command continues what was committed.")
    if error.errno in _LIMIT_ERRNOS:
        return LimitError(f"{where}: {why}. Raise the limit of this process or its node (ulimit -a), and run again.")
    if error.errno in _PATH_ERRNOS and error.filename:
        return RecipeError(f"{where}: {why}. Pass another path.")
    return None


def _raise_stopped(signum: int) -> NoReturn:
    raise_stopped(signum, f"Stopped by {name_signal(signum)} before publishing. The same command continues the work.")
