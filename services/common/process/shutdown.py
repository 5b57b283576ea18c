"""Ends a program early: the signals that ask for it, the reasons to stop, and the grace period.

SIGTERM, SIGHUP and Ctrl-C ask a program to stop where the same command can continue later. SIGHUP, which a closing
terminal sends, has the meaning of SIGTERM. A signal that the program was started to ignore, such as SIGHUP under
`nohup`, stays ignored.
"""

from __future__ import annotations

import enum
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from services.common.errors import EXIT_INTERRUPTED, TryAgain

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

# `timeout` signals its child and then the child's process group; for a terminal that closes, both the kernel and the
# shell send SIGHUP. Signals within this time are one request.
REPEAT_SECONDS = 1.0

END_SECONDS = 2.0
"""Seconds after a second stop signal in which a command may still end in order, before it is ended at once."""

AGAIN_SECONDS = 0.1

DRAIN_TIMEOUT_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Variable with the seconds that Ray gives to a node which has to leave. Every stage's container sets it."""
TRAINER_GRACE_SECONDS = 300
"""Grace period in seconds of a trainer's container on every target, unless a deployment or the machines set another."""
CHECKPOINTS_PER_GRACE_PERIOD = 3
"""Checkpoints that a grace period should hold: a stop waits for its step and for a checkpoint that is being written."""


class Stopped(BaseException):
    """A signal ended the work. It is no `Exception`, because libraries catch those and go on."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = exit_code_after(signum)


_raised: list[Stopped] = []


def raise_stopped(signum: int, message: str) -> NoReturn:
    """Raise `Stopped`, and remember it for `stop_behind`."""
    _raised.append(Stopped(signum, message))
    raise _raised[-1]


def forget_stops() -> None:
    _raised.clear()


def stop_behind(error: BaseException) -> BaseException:
    """Return the `Stopped` that a library turned into this error, or the error itself.

    `io.BufferedReader` raises ValueError, "read of closed file", whatever was raised by `closed` of an fsspec file.
    """
    return error if isinstance(error, Stopped) or not _raised else _raised[-1]


def exit_code_after(signum: int) -> int:
    return EXIT_INTERRUPTED if signum == signal.SIGINT else TryAgain.exit_code


def name_signal(signum: int) -> str:
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


def end_at_once(signum: int) -> NoReturn:
    """End this process at once, without any cleanup."""
    message = f"millrace: {name_signal(signum)}: exiting now; the same command continues from what was committed.\n"
    with suppress(OSError):  # stderr has no reader
        os.write(2, message.encode())
    os._exit(exit_code_after(signum))


def end_soon(signum: int, message: str) -> NoReturn:
    """Raise `Stopped` to end this process in order, and end it at once where it still runs END_SECONDS later."""
    _call_later(END_SECONDS, end_at_once, signum)
    raise_stopped(signum, message)


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
        for signum, outer in previous.items():
            if isinstance(outer, _Handler) and outer.first_at is None:
                outer.first_at = handler.first_at
            signal.signal(signum, outer)


@contextmanager
def deferring_stop_signals() -> Iterator[None]:
    """Deliver a stop signal only after the block, for calls that would lose the handler's error, or must not be
    interrupted. A second signal ends the process.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield
        return
    arrived: list[int] = []
    previous = _replace(_Handler(arrived.append, end_at_once))
    try:
        yield
    finally:
        for signum, outer in previous.items():
            signal.signal(signum, outer)
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
    _call_later(AGAIN_SECONDS, os.kill, os.getpid(), error.signum)


def _call_later(seconds: float, function: Callable[..., object], *arguments: int) -> None:
    """Call the function in a thread that does not keep the process from ending."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _let_go_of_terminal() -> None:
    """Replace a closed terminal by /dev/null, so that the remaining work does not fail when it prints."""
    for descriptor in filter(is_reader_gone, (1, 2)):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _replace(handler: _Handler) -> dict[signal.Signals, Any]:
    """Install a handler for all signals that are not ignored, and return those before it."""
    heeded = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in heeded}


class StopReason(enum.IntEnum):
    """Reasons to stop, from the weakest to the strongest."""

    NONE = 0
    TIME_LIMIT = 1
    STOP_FILE = 2
    # The command gets these, and passes them on through the stop file.
    PREEMPTION = 3
    SIGTERM = 4
    INTERRUPT = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


def needed_grace_seconds(checkpoint_seconds: float) -> int:
    """Return the grace period in seconds in which a checkpoint that takes this long is always committed."""
    return math.ceil(CHECKPOINTS_PER_GRACE_PERIOD * checkpoint_seconds)


def check_grace_period(checkpoint_seconds: float) -> str:
    """Return a warning where the container's grace period may be too short for a checkpoint of these seconds, or ""."""
    grace_seconds = float(os.environ.get(DRAIN_TIMEOUT_VARIABLE) or "inf")
    needed = needed_grace_seconds(checkpoint_seconds)
    if needed <= grace_seconds:
        return ""
    return (
        f"a checkpoint took {checkpoint_seconds:.1f} s, and this container has a grace period of "
        f"{grace_seconds:g} s, which should be {CHECKPOINTS_PER_GRACE_PERIOD} times as long: a stop may lose the steps "
        f"since the checkpoint before. On Kubernetes the next deployment sets {needed} s by itself; on AWS "
        f"Batch, raise checkpoint_gb in the tfvars of infra/stacks/batch, then make infra-up STACK=batch"
    )
