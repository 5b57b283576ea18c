"""Follows all processes that a command of a soak starts, and finds those that outlive it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "MILLRACE_SOAK"
"""Environment variable that all processes of a soak's command inherit; its value is the command's own."""
LEAVE_SECONDS = 90.0
"""Seconds that the processes of an ended command may take to end: Ray's agents take a minute after a kill."""


class Family:
    """The processes of one command, itself included.

    A process belongs to it when a look has found it below a process of the family, or when its environment has the
    command's mark. So a process is known that has lost its parents since, and one that has overwritten its environment.
    """

    def __init__(self, command: psutil.Process, mark: str) -> None:
        self._command, self._sign = command, f"{MARK}={mark}".encode()
        self._known = {command}

    def look(self) -> list[psutil.Process]:
        """Return the living processes of the command, itself left out, in the order of their ids."""
        parents = {process: _parent_of(process) for process in psutil.process_iter() if _is_alive(process)}
        ids = {process.pid for process in self._known if process in parents}
        ids |= {process.pid for process in parents if self._sign in _environment_of(process.pid)}
        before = 0
        while len(ids) > before:
            before = len(ids)
            ids |= {process.pid for process, parent in parents.items() if parent in ids}
        self._known |= {process for process in parents if process.pid in ids and process.pid != os.getpid()}
        found = [process for process in self._known if process in parents and process != self._command]
        return sorted(found, key=lambda process: process.pid)

    def wait_until_gone(self) -> list[psutil.Process]:
        """Return the processes that still live LEAVE_SECONDS after the command's end."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while (left := self.look()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return left


def is_worker(process: psutil.Process) -> bool:
    """Whether a process works for a stage: a fork of a fork server, a task of the tokenizer or a compilation."""
    line = describe(process)
    if "forkserver" in line:
        with suppress(psutil.Error):
            parent = process.parent()
            return parent is not None and "forkserver" in describe(parent)
    return "spawn_main" in line or "ray::" in line


def describe(process: psutil.Process) -> str:
    """Return the command line of a process, or its name where it has none any more."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _parent_of(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return process.ppid()
    return 0


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
