"""Runs programs that must end by themselves: terraform has to write its state, helm has to roll back."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import DeviceError, Interrupted, TryAgain
from services.common.process.shutdown import name_signal, on_stop_signal


def find_program(name: str, purpose: str, source: str) -> str:
    """Returns a program's path. Raises `DeviceError` with what it is for and where it is from, when PATH lacks it."""
    path = shutil.which(name)
    if path is None:
        raise DeviceError(f"no {name} on PATH, which {purpose}. Get {source}")
    return path


def run_to_its_end(command: Sequence[str]) -> int:
    """Runs a program with this process' stdout and stderr, and returns its exit code.

    Passes a stop signal on once, and waits. `subprocess.run` would kill the program at Ctrl-C, and a terminal would
    send Ctrl-C to both processes, which terraform counts as a second one and ends without writing its state. Raises
    `Interrupted` or `TryAgain` if the program ended after a signal.
    """
    received: list[int] = []
    passed_on: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int) -> None:
        received.append(signum)
        if process is not None:
            passed_on.append(signum)
            process.send_signal(signal.SIGINT)

    with on_stop_signal(pass_on, pass_on):
        process = subprocess.Popen(list(command), process_group=0)
        if received and not passed_on:  # a signal came before there was a process to pass it on to
            process.send_signal(signal.SIGINT)
        exit_code = process.wait()
    if received:
        message = (
            f"{name_signal(received[0])}: {Path(command[0]).name} ended by itself with {exit_code}. Its changes stay; "
            f"run the same command again to continue"
        )
        raise Interrupted(message) if received[0] == signal.SIGINT else TryAgain(message)
    return exit_code
