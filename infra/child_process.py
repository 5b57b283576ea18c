"""Runs terraform, kubectl and helm. Those that change something end by themselves: terraform writes its state then."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from services.common.errors import DeviceError, Interrupted, TryAgain
from services.common.process.shutdown import name_signal, on_stop_signal

POLL_SECONDS = 0.2
PROGRAMS = {
    "terraform": "makes the account's resources. Get 1.10 or newer from "
    "https://developer.hashicorp.com/terraform/install",
    "kubectl": "reads and changes the cluster. Get 1.27 or newer from https://kubernetes.io/docs/tasks/tools",
    "helm": "installs the cluster's add-ons. Get 3.13 or newer from https://helm.sh/docs/intro/install",
}


def find_program(name: str) -> str:
    """Returns a program's path. Raises `DeviceError` with what it is for and where it is from, when PATH lacks it."""
    path = shutil.which(name)
    if path is None:
        raise DeviceError(f"no {name} on PATH, which {PROGRAMS[name]}")
    return path


def read_output(name: str, *arguments: str, written: str = "", advice: str = "") -> str:
    """Runs a program with `written` as its standard input, and returns its output.

    Raises `DeviceError` with the program's message and the advice for any other exit code than 0.
    """
    command = [find_program(name), *arguments]
    done = subprocess.run(command, input=written, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join((name, *arguments[:4]))
        more = f". {advice}" if advice else ""
        raise DeviceError(f"{shown} ended with {done.returncode}: {done.stderr.strip()}{more}")
    return done.stdout


def run_to_its_end(command: Sequence[str]) -> int:
    """Runs a program with this process' stdout and stderr, and returns its exit code.

    Passes a stop signal on once, and waits. `subprocess.run` would kill the program at Ctrl-C, and a terminal would
    send Ctrl-C to both processes, which terraform counts as a second one and ends without writing its state. Raises
    `Interrupted` or `TryAgain` if the program ended after a signal.
    """
    received: list[int] = []
    with on_stop_signal(received.append, received.append):
        process = subprocess.Popen(list(command), process_group=0)
        while not received and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        if received:
            process.send_signal(signal.SIGINT)
        exit_code = process.wait()
    if received:
        message = (
            f"{name_signal(received[0])}: {Path(command[0]).name} ended by itself with {exit_code}. Its changes stay; "
            f"run the same command again to continue"
        )
        raise Interrupted(message) if received[0] == signal.SIGINT else TryAgain(message)
    return exit_code
