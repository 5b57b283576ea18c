"""Handles SIGTERM, SIGHUP and Ctrl-C, which ask a program to stop where the same command can continue later.

SIGHUP, which a closing terminal sends, has the meaning of SIGTERM. A signal that the program was started to ignore,
such as SIGHUP under `nohup`, stays ignored.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

# `timeout` signals its child and then the child's process group; for a terminal that closes, both the kernel and the
# shell send SIGHUP. Signals within this time are one request.
REPEAT_SECONDS = 1.0

END_SECONDS = 2.0
"""Seconds after a second stop signal in which a command may still end in order, before it is ended at once."""

DEFERRED_SECONDS = 10.0
AGAIN_SECONDS = 0.1

_EXIT_STOPPED = 75
_EXIT_INTERRUPTED = 130


class Stopped(BaseException):
    """A signal ended the work. It is no `Exception`, because libraries catch those and go on."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = exit_code_after(signum)


def exit_code_after(signum: int) -> int:
    return _EXIT_INTERRUPTED if signum == signal.SIGINT else _EXIT_STOPPED


def name_signal(signum: int) -> str:
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


def end_at_once(signum: int) -> NoReturn:
    """End this process at once, without any cleanup."""
    message = (
        f"millrace: Ended at once by {name_signal(signum)}. What was committed stays; the same command continues.\n"
    )
    say_if_heard(message)
    os._exit(exit_code_after(signum))


def say_if_heard(message: str) -> None:
    """Write a line to stderr unless that would wait, because a pipe may be full and its reader paused. `select` reports
    a pipe as writable where PIPE_BUF bytes fit.
    """
    with suppress(OSError, ValueError):  # stderr has no reader, or is closed
        if select.select([], [2], [], 0)[1]:
            os.write(2, message.encode()[: select.PIPE_BUF])


def end_soon(signum: int, message: str) -> NoReturn:
    """Raise `Stopped` to end this process in order, and end it at once where it still runs END_SECONDS later."""
    timer = threading.Timer(END_SECONDS, end_at_once, [signum])
    timer.daemon = True
    timer.start()
    raise Stopped(signum, message)


class _Handler:
    """Calls `first` with the first stop signal, and `again` with a signal more than REPEAT_SECONDS later."""

    def __init__(self, first: Callable[[int], object], again: Callable[[int], object]) -> None:
        self._first, self._again = first, again
        self.first_at: float | None = None

    def __call__(self, signum: int, frame: object) -> None:
        now = time.monotonic()
        if signum == signal.SIGHUP:
            _let_go_of_terminal()
        if self.first_at is None:
            self.first_at = now
            self._first(signum)
        elif now - self.first_at > REPEAT_SECONDS:
            self._again(signum)


def install(first: Callable[[int], object], again: Callable[[int], object] = end_at_once) -> None:
    """Call `first` with the first stop signal from now on, and `again` with one more than REPEAT_SECONDS later."""
    _replace(_Handler(first, again))
    sys.unraisablehook = _deliver_again


def ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextmanager
def on_stop_signal(first: Callable[[int], object], again: Callable[[int], object] = end_at_once) -> Iterator[None]:
    """Do the same as `install` for the block. A signal during the block counts as the first one afterwards, too."""
    handler = _Handler(first, again)
    previous = _replace(handler)
    try:
        yield
    finally:
        for outer in previous.values():
            if isinstance(outer, _Handler) and outer.first_at is None:
                outer.first_at = handler.first_at
        _restore(previous)


@contextmanager
def deferring_stop_signals() -> Iterator[None]:
    """Deliver a stop signal only after the block, for calls that would lose the handler's error, or must not be
    interrupted. Where the block still runs DEFERRED_SECONDS after a signal, the process is ended.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield
        return
    arrived: list[int] = []
    timers: list[threading.Timer] = []

    def note(signum: int) -> None:
        arrived.append(signum)
        timers.append(threading.Timer(DEFERRED_SECONDS, end_at_once, [signum]))
        timers[-1].daemon = True
        timers[-1].start()

    previous = _replace(_Handler(note, end_at_once))
    try:
        yield
    finally:
        _restore(previous)
        for timer in timers:
            timer.cancel()
        if arrived:
            signal.raise_signal(arrived[0])


def is_reader_gone(descriptor: int) -> bool:
    """Tell whether a descriptor has no reader any more: a pipe without one, or a closed terminal."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _deliver_again(unraisable: Any) -> None:
    """Send a signal again whose handler raised `Stopped` in a callback from C, where Python only prints the error."""
    error = unraisable.exc_value
    if not isinstance(error, Stopped):
        sys.__unraisablehook__(unraisable)
        return
    handler = signal.getsignal(error.signum)
    if isinstance(handler, _Handler):
        handler.first_at = None
    timer = threading.Timer(AGAIN_SECONDS, os.kill, [os.getpid(), error.signum])
    timer.daemon = True
    timer.start()


def _let_go_of_terminal() -> None:
    """Replace a closed terminal by /dev/null, so that the remaining work does not fail when it prints."""
    for descriptor in (1, 2):
        if is_reader_gone(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _replace(handler: _Handler) -> dict[signal.Signals, Any]:
    """Install a handler for all signals that are not ignored, and return those before it."""
    heeded = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in heeded}


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
