"""Injects faults into a running command: signals to its processes, and full or suspended file systems."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from services.trainer.tests.runs import command_line_of
from tests.soak.plan import Fault

MARK = "MILLRACE_SOAK"
"""Environment variable that all processes of a soak's command inherit; its value is the command's own."""
LEAVE_SECONDS = 90.0
"""Seconds that the processes of an ended command may take to end: Ray's agents take a minute after a kill."""
_BALLAST = "ballast"


class Disk:
    """A mounted file system in an image file, for root alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Write a file until no block is left."""
        status = os.statvfs(self.folder)
        size, end = status.f_bavail * status.f_frsize, 0
        with (self.folder / _BALLAST).open("wb") as file:
            while size >= status.f_frsize:
                try:
                    os.posix_fallocate(file.fileno(), end, size)
                    end += size
                except OSError:
                    size //= 2

    def free(self) -> None:
        (self.folder / _BALLAST).unlink(missing_ok=True)

    def suspend(self) -> None:
        """Let every write wait until `resume`, as a network file system does whose server is gone for a while."""
        subprocess.run(["fsfreeze", "--freeze", self.folder], check=True)

    def resume(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", self.folder], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def mounted_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Make an ext4 file system of this size and mount it at `folder`; unmount it and delete its image at the end."""
    image = folder.with_suffix(".img")
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop,noatime", image, folder], check=True)
    disk = Disk(folder)
    try:
        yield disk
    finally:
        disk.resume()
        subprocess.run(["umount", "--lazy", folder], check=True)  # a process that leaked may hold a file
        image.unlink()
        folder.rmdir()


class ProcessTree:
    """The processes of one command.

    A process belongs to it when a look has found it below a process of the tree, or when its environment has the
    command's mark. So a process is known that has lost its parents since, and one that has overwritten its environment.
    """

    def __init__(self, command: psutil.Process, mark: str) -> None:
        self.command, self._mark = command, mark
        self._known = {command}

    def list_others(self) -> list[psutil.Process]:
        """Return the living processes of the command, itself left out, in the order of their ids."""
        found = psutil.process_iter(["ppid", "status", "environ"])
        alive = {process: process.info for process in found if process.info["status"] != psutil.STATUS_ZOMBIE}
        ids = {process.pid for process in self._known if process in alive}
        ids |= {process.pid for process, info in alive.items() if (info["environ"] or {}).get(MARK) == self._mark}
        before = 0
        while len(ids) > before:
            before = len(ids)
            ids |= {process.pid for process, info in alive.items() if info["ppid"] in ids}
        self._known |= {process for process in alive if process.pid in ids and process.pid != os.getpid()}
        others = [process for process in self._known if process in alive and process != self.command]
        return sorted(others, key=lambda process: process.pid)

    def wait_until_gone(self) -> list[psutil.Process]:
        """Return the processes that still live LEAVE_SECONDS after the command's end."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while (left := self.list_others()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return left


def is_worker(process: psutil.Process) -> bool:
    """Whether a process works for a stage: a fork of a fork server, a task of the tokenizer or a compilation."""
    line = command_line_of(process)
    if "forkserver" in line:
        with suppress(psutil.Error):
            parent = process.parent()
            return parent is not None and "forkserver" in command_line_of(parent)
    return "spawn_main" in line or "ray::" in line


class Injector:
    """Injects faults, and keeps those that last until their time is over."""

    def __init__(self, root_disk: Disk, scratch_disk: Disk) -> None:
        self._root_disk, self._scratch_disk = root_disk, scratch_disk
        self._lasting: list[tuple[float, Callable[[], object]]] = []

    def inject(self, fault: Fault, tree: ProcessTree) -> str | None:
        """Let the fault happen, and return its target; None where there is nothing that it could happen to."""
        others = tree.list_others()
        workers = [process for process in others if is_worker(process)]
        match fault.kind:
            case "kill a worker":
                return _signal(_choose(workers, fault), signal.SIGKILL)
            case "kill another process of the command":
                return _signal(_choose([each for each in others if each not in workers], fault), signal.SIGKILL)
            case "kill the command":
                return _signal([tree.command], signal.SIGKILL)
            case "kill everything at once":
                return _signal([tree.command, *others], signal.SIGKILL)
            case "freeze a worker":
                chosen = _choose(workers, fault)
                if chosen:
                    self._keep(fault, lambda: _signal(chosen, signal.SIGCONT))
                return _signal(chosen, signal.SIGSTOP)
            case "SIGTERM" | "SIGINT":
                return _signal([tree.command], signal.Signals[fault.kind])
            case "fill the root's disk" | "fill the scratch disk":
                disk = self._root_disk if fault.kind == "fill the root's disk" else self._scratch_disk
                disk.fill()
                self._keep(fault, disk.free)
                return str(disk.folder)
            case "suspend the root's disk":
                self._root_disk.suspend()
                self._keep(fault, self._root_disk.resume)
                return str(self._root_disk.folder)
        return None

    def end_due(self, *, is_all: bool = False) -> None:
        """End the faults whose time is over, or all."""
        for each in [each for each in self._lasting if is_all or each[0] <= time.monotonic()]:
            self._lasting.remove(each)
            each[1]()

    def wait(self) -> None:
        """Wait until no fault lasts any more."""
        while self._lasting:
            time.sleep(0.1)
            self.end_due()

    def _keep(self, fault: Fault, end: Callable[[], object]) -> None:
        self._lasting.append((time.monotonic() + fault.seconds, end))


def _choose(candidates: Sequence[psutil.Process], fault: Fault) -> list[psutil.Process]:
    return [candidates[int(fault.choice * len(candidates))]] if candidates else []


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> str | None:
    """Send a signal to the processes; returns which they are, and None where none is there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return f"pid {', '.join(str(process.pid) for process in processes)}" if processes else None
