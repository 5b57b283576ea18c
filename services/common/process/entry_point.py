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
    Interrupted,
    MillraceError,
    RecipeError,
    TryAgain,
    explain_storage_error,
    print_traceback,
)
from services.common.hardware.faults import explain_hardware_fault
from services.common.input.files import InputFileError, unreadable
from services.common.process.limits import explain_lack
from services.common.process.stop_signals import (
    Stopped,
    end_at_once,
    ignore_stop_signals,
    install,
    is_reader_gone,
    name_signal,
    on_stop_signal,
)

_at_end: list[Callable[[int], None]] = []


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Run `main(argv)` and exit with the code of its error, or 0."""
    # A stage that gets a stop signal before it has work to lose ends like a preempted one. The trainer replaces this
    # handler by one that first commits a checkpoint.
    install(_raise_stopped)
    sys.excepthook = lambda _, error, __: print_traceback(error)
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
    """Run `work`, and return the exit code of its error once the message is printed, or the code that it returned."""
    try:
        exit_code = work()
        sys.stdout.flush()  # here, where the `BrokenPipeError` of a reader that has gone is handled
        return exit_code
    except (MillraceError, Stopped) as error:
        return _report(error)
    except KeyboardInterrupt:  # a program that is not a stage has Python's own handler
        return _report(Interrupted("Interrupted. Nothing is half published; the same command continues."))
    except BrokenPipeError:
        if not is_reader_gone(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        explained = explain_os_error(error) or explain_hardware_fault(error)
        if explained is None:
            raise
        return _report(explained)


def exit_code_for(error: BaseException) -> int:
    """Return the exit code with which `run_program` ends after an error."""
    if isinstance(error, MillraceError | Stopped):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    explained = (
        explain_os_error(error) or explain_hardware_fault(error)
        if isinstance(error, OSError | MemoryError | RuntimeError)
        else None
    )
    return explained.exit_code if explained else EXIT_BUG


def explain_os_error(error: Exception) -> MillraceError | None:
    """Return the error that a user can act on for an error about a file, memory or threads; None for others.

    A failed read is never explained as a failed write.
    """
    lack = explain_lack(error, getattr(error, "filename", None) or "")
    if lack is not None or not isinstance(error, OSError):
        return lack
    if error.errno == errno.ENAMETOOLONG:
        return RecipeError(f"{error.filename}: {error.strerror}. Pass a shorter path, or shorten the name.")
    if error.errno in TRANSIENT_ERRNOS and not isinstance(error, ConnectionError):
        return TryAgain(
            f"{error.filename or 'the file system'}: {error.strerror}. Repair the mount or the disk; the same command "
            f"continues from what was committed."
        )
    if isinstance(error, InputFileError):
        return unreadable(error.filename, error)
    return explain_storage_error(error) if error.errno in STORAGE_ERRNOS else None


def _report(error: MillraceError | Stopped) -> int:
    with suppress(OSError):  # stderr has no reader
        print(f"millrace: {_escape(str(error))}", file=sys.stderr, flush=True)
    return error.exit_code


def _escape(message: str) -> str:
    """Write out control characters, which a name in a foreign file may have and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in message)


def _raise_stopped(signum: int) -> NoReturn:
    raise Stopped(signum, f"Stopped by {name_signal(signum)} before publishing. The same command continues the work.")
