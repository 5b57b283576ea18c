"""Injects faults into a running command, and ends those that last."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil

from tests.soak.disk import Disk
from tests.soak.plan import Fault
from tests.soak.processes import Family, is_worker

T = TypeVar("T")


@dataclass
class Injected:
    """A fault that has happened, and what came of it."""

    fault: Fault
    at: float
    """Time of the monotonic clock at which the fault began."""
    target: str
    furthest_step: int = 0
    """Last recorded step of the run before the fault."""
    outcome: str = "the command went on"
    recovery_seconds: float | None = None
    """Seconds from the begin of the fault to a step beyond `furthest_step`, or to the stage's end."""


@dataclass
class _Lasting:
    ends_at: float
    end: Callable[[], None]
    is_of_disk: bool


class Injector:
    """Injects faults into the command of one stage, and keeps those that last until their time is over."""

    def __init__(self, root_disk: Disk, scratch_disk: Disk) -> None:
        self._root_disk, self._scratch_disk = root_disk, scratch_disk
        self._lasting: list[_Lasting] = []
        self.has_killed_command = False
        """Whether a fault has killed the running command."""

    def begin_command(self) -> None:
        self.has_killed_command = False

    def inject(self, fault: Fault, command: psutil.Process, family: Family) -> str | None:
        """Let the fault happen, and return its target; None where there is nothing that it could happen to."""
        others = family.look()
        workers = [process for process in others if is_worker(process)]
        with suppress(psutil.NoSuchProcess):
            match fault.kind:
                case "kill a worker":
                    return self._signal(_choose(workers, fault), signal.SIGKILL)
                case "kill another process of the command":
                    return self._signal(
                        _choose([each for each in others if each not in workers], fault), signal.SIGKILL
                    )
                case "kill the command":
                    self.has_killed_command = True
                    return self._signal(command, signal.SIGKILL)
                case "kill everything at once":
                    self.has_killed_command = True
                    for process in [command, *others]:
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
                    return f"{1 + len(others)} processes"
                case "freeze a worker":
                    return self._freeze(_choose(workers, fault), fault)
                case "SIGTERM" | "SIGINT":
                    return self._signal(command, signal.Signals[fault.kind])
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

    def end_due(self) -> None:
        """End the faults whose time is over."""
        for each in [each for each in self._lasting if each.ends_at <= time.monotonic()]:
            self._lasting.remove(each)
            each.end()

    def end_of_command(self) -> None:
        """End the faults that processes of the ended command had; those of disks last on."""
        for each in [each for each in self._lasting if not each.is_of_disk]:
            self._lasting.remove(each)
            each.end()

    def end_all(self) -> None:
        while self._lasting:
            self._lasting.pop().end()

    def wait(self) -> None:
        """Wait until no fault lasts any more."""
        while self._lasting:
            time.sleep(0.1)
            self.end_due()

    def _keep(self, fault: Fault, end: Callable[[], None]) -> None:
        self._lasting.append(_Lasting(time.monotonic() + fault.seconds, end, fault.kind.endswith("disk")))

    def _signal(self, process: psutil.Process | None, number: signal.Signals) -> str | None:
        if process is None:
            return None
        process.send_signal(number)
        return f"pid {process.pid}"

    def _freeze(self, process: psutil.Process | None, fault: Fault) -> str | None:
        if process is None:
            return None
        process.suspend()

        def resume() -> None:
            with suppress(psutil.Error):
                process.resume()

        self._keep(fault, resume)
        return f"pid {process.pid}"


def _choose(candidates: Sequence[T], fault: Fault) -> T | None:
    return candidates[int(fault.choice * len(candidates))] if candidates else None
