"""SIGTERM, SIGHUP and Ctrl-C: each asks a program of ours to stop where the same command can go on later.

SIGHUP, which a closing terminal sends, is as good as SIGTERM. A signal that the program was started to ignore, as
`nohup` has it with SIGHUP, stays ignored.
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

# `timeout` signals its child, and then the group that the child is in; a terminal that closes sends SIGHUP by the
# kernel and by the shell. All of that is one request.
REPEAT_SECONDS = 1.0

END_SECONDS = 2.0
"""Seconds that a command has after a second stop signal to end in order: then it ends as it is."""

DEFERRED_SECONDS = 10.0
AGAIN_SECONDS = 0.1

_EXIT_STOPPED = 75
_EXIT_INTERRUPTED = 130

_before_forced_end: list[Callable[[], None]] = []


class Stopped(BaseException):
    """A signal ended the work. No `Exception`: libraries take those for failures of their own, and go on."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = exit_code_after(signum)


def exit_code_after(signum: int) -> int:
    return _EXIT_INTERRUPTED if signum == signal.SIGINT else _EXIT_STOPPED


def name_signal(signum: int) -> str:
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


def call_before_forced_end(leave: Callable[[], None]) -> None:
    """Let `end_at_once` call `leave()` before it ends the process, from whichever thread."""
    _before_forced_end.append(leave)


def end_at_once(signum: int) -> NoReturn:
    """End this process here and now, without any of its own cleaning up but what `call_before_forced_end` was given."""
    message = (
        f"millrace: Ended at once by {name_signal(signum)}. What was committed stays; the same command continues.\n"
    )
    say_if_heard(message)
    try:
        for leave in _before_forced_end:
            leave()
    finally:
        os._exit(exit_code_after(signum))


def say_if_heard(message: str) -> None:
    """Write a line to stderr unless that would wait: a pipe may be full and its reader paused, and who ends a command
    must not hang with it. Poll tells of a pipe that there is room for as many bytes as one write takes whole.
    """
    with suppress(OSError, ValueError):  # nobody reads, or stderr is closed
        if select.select([], [2], [], 0)[1]:
            os.write(2, message.encode()[: select.PIPE_BUF])


def end_soon(signum: int, message: str) -> NoReturn:
    """Raise `Stopped` to end this process in order; whatever it hangs in meanwhile, it is gone END_SECONDS later."""
    timer = threading.Timer(END_SECONDS, end_at_once, [signum])
    timer.daemon = True
    timer.start()
    raise Stopped(signum, message)


class _Handler:
    """Calls `first` with the first stop signal, and `again` with any that follows REPEAT_SECONDS later."""

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
    """From now on, call `first` with the first stop signal, and `again` with any that follows REPEAT_SECONDS later."""
    _replace(_Handler(first, again))
    sys.unraisablehook = _deliver_again


def ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextmanager
def on_stop_signal(first: Callable[[int], object], again: Callable[[int], object] = end_at_once) -> Iterator[None]:
    """`install`, for as long as the block takes. A signal that came meanwhile is the first one afterwards, too."""
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
    """Deliver a stop signal when the block has ended: for calls that would lose what a handler raises, or that must not
    be left half done. A block that has not ended DEFERRED_SECONDS later is ended, with the process.
    """
    if threading.current_thread() is not threading.main_thread():  # others get no signals
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
    """Does nobody read what is written there any more: a pipe without a reader, a terminal that was closed?"""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _deliver_again(unraisable: Any) -> None:
    """What a handler raises in a callback from C is lost there, and printed: let the signal come once more."""
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
    """Writing to a terminal that was closed fails, which must not end what is left to do."""
    for descriptor in (1, 2):
        if is_reader_gone(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _replace(handler: _Handler) -> dict[signal.Signals, Any]:
    """The handlers that were there."""
    heeded = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in heeded}


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
