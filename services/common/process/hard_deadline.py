"""Ends a process that hangs in a call that keeps Python's lock: no thread of Python runs, no signal is handled.

Timers of the C library call a function of C in a thread of their own, which needs no lock.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGEV_THREAD = 2  # of <signal.h>
_SIGEVENT_BYTES = 64
_SAID_SECONDS = 0.1
"""Seconds between the message and the end. They are two timers, because the message may wait for a reader of stderr."""
_PROGRAM = ctypes.create_string_buffer(b"millrace")


@contextmanager
def ending_after(seconds: float, message: str, exit_code: int) -> Iterator[None]:
    """End this process with a message and an exit code where the block takes longer. Only Linux has such timers."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    ctypes.c_void_p.in_dll(libc, "program_invocation_short_name").value = ctypes.addressof(_PROGRAM)  # warnx says it
    text = ctypes.create_string_buffer(message.replace("%", "%%").encode())
    timers = [
        _start_timer(libc, seconds, libc.warnx, ctypes.addressof(text)),
        _start_timer(libc, seconds + _SAID_SECONDS, libc._exit, exit_code),
    ]
    try:
        yield
    finally:
        for timer in timers:
            libc.timer_delete(timer)


def _start_timer(libc: Any, seconds: float, function: Any, argument: int) -> ctypes.c_void_p:
    """Let the C library call `function(argument)` after some time."""
    timer, address = ctypes.c_void_p(), ctypes.cast(function, ctypes.c_void_p).value
    event = struct.pack("@PiiPP", argument, 0, _SIGEV_THREAD, address, 0).ljust(_SIGEVENT_BYTES, b"\0")
    once = struct.pack("@4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))  # struct itimerspec
    if libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0:
        libc.timer_settime(timer, 0, once, None)
    return timer
