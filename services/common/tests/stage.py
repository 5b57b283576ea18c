"""Runs a small stage for tests: `python -m services.common.tests.stage BEHAVIOUR`."""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import suppress
from pathlib import Path

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.process.shutdown import deferring_stop_signals, end_at_once, on_stop_signal
from services.common.process.stage_program import run_stage
from services.common.tests import work


def main(argv: list[str]) -> int:
    behaviour, *arguments = argv
    behaviours = {
        "wait": wait_for_signal,
        "load": load,
        "defer": defer,
        "call-back": call_back,
        "clean-up": clean_up,
        "bug": bug,
        "one-line": one_line,
        "many-lines": many_lines,
        "workers": workers,
    }
    return behaviours[behaviour](arguments)


def wait_for_signal(arguments: list[str]) -> int:
    print("ready", flush=True)
    while True:
        time.sleep(60)


def load(arguments: list[str]) -> int:
    """Wait during an import that catches every error of its own imports."""
    with on_stop_signal(end_at_once), suppress(Exception):
        wait_for_signal(arguments)
    return 0


def defer(arguments: list[str]) -> int:
    """Wait for stdin's end in a call that loses the errors of signal handlers, and handle the signal afterwards."""
    with deferring_stop_signals(), suppress(BaseException):
        print("ready", flush=True)
        sys.stdin.read()
    return 0


def call_back(arguments: list[str]) -> int:
    """Wait in a callback from C, which loses every error raised in it."""
    ctypes.CFUNCTYPE(None)(lambda: wait_for_signal(arguments))()
    return wait_for_signal(arguments)


def clean_up(arguments: list[str]) -> int:
    """Wait, and take half a second to clean up."""
    try:
        return wait_for_signal(arguments)
    finally:
        print("cleaning up", flush=True)
        time.sleep(0.5)
        print("clean")


def bug(arguments: list[str]) -> int:
    return {"here": 1}["nowhere"]


def one_line(arguments: list[str]) -> int:
    print("a line")
    return 0


def many_lines(arguments: list[str]) -> int:
    for number in range(100_000):
        print("line", number)
    return 0


def workers(arguments: list[str]) -> int:
    """Start two workers that block; the arguments after the folder are modules that they import before."""
    folder, *preload = arguments
    run_workers(inline, work.block, Path(folder), WorkerGroupSpec(2, 1, 1, Path(folder), preload=tuple(preload)))
    return 0


if __name__ == "__main__":
    run_stage("trainer", main)
