"""The processes that a command has started, whoever is their parent by now, and which of them are stopped.

A process belongs to a command's family when the command is an ancestor of it, when it is in a session that the command
made for it, or when it was started with the command's mark in its environment. No one of the three is enough: an orphan
has lost its ancestors, Ray gives its processes sessions of their own, and Ray's workers overwrite their environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "MILLRACE_COMMAND"
"""The environment variable that a command's processes inherit: its value is the mark of the one command."""

STOPPED_SECONDS = 5.0
"""Seconds for which a process has to be seen stopped, by SIGSTOP or SIGTSTP, before it is taken for frozen. A process
that is only slow, because it imports on a busy machine for instance, is never stopped; neither is one that a debugger
holds, whose state is another.
"""

_TRACKER_SECONDS = 1.0
_AGAIN_SECONDS = 0.05
_MOST_SECONDS_BETWEEN_LOOKS = 2.0
_IS_EXITING = 0x4  # PF_EXITING of linux/sched.h, in the flags of proc_pid_stat(5)


def is_stopped(pid: int) -> bool:
    """Is this process stopped by a signal, so that it does nothing until SIGCONT or SIGKILL comes?"""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def find_stopped() -> set[int]:
    """The ids of all processes of this machine that are stopped by a signal."""
    return {pid for pid in psutil.pids() if is_stopped(pid)}


def has_ended(pid: int) -> bool:
    """Has this process ended, whether or not its parent has asked for its exit code?"""
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True


class Stopwatch:
    """Seconds for which something has been seen to last, from look to look.

    A time between two looks counts for 2 s at most: who looks may have been stopped meanwhile itself, as by Ctrl-Z.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at: float | None = None

    def look(self, lasts: bool) -> float:
        """The seconds so far, in which this look is; 0 when it does not last any more."""
        now = time.monotonic()
        if not lasts:
            self.seconds, self._looked_at = 0.0, None
        elif self._looked_at is None:
            self._looked_at = now
        else:
            self.seconds += min(now - self._looked_at, _MOST_SECONDS_BETWEEN_LOOKS)
            self._looked_at = now
        return self.seconds


def find_family(command: int, sessions: Collection[int], mark: str) -> list[psutil.Process]:
    """The living processes that the command `command` has started. It is not among them, and neither is this process,
    nor one of either's threads.

    Among them are all processes of this user that are ending at this moment, whoever has started them: they have given
    their environment back, their parent may be gone, and until they have ended they hold files and locks.
    """
    parents: dict[int, int] = {}
    processes: dict[int, psutil.Process] = {}
    members: set[int] = set()
    ending: set[int] = set()
    sign = f"{MARK}={mark}".encode()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE and not _has_threads(process.pid):
                continue
            parents[process.pid] = process.ppid()
            processes[process.pid] = process
            if os.getsid(process.pid) in sessions or sign in _read_environment(process.pid):
                members.add(process.pid)
            elif _is_ending(process.pid) and process.uids().real == os.getuid():
                ending.add(process.pid)  # no member: what it has started may be somebody else's
    strangers = {command, os.getpid()}
    for pid in parents:
        line = [pid]
        while line[-1] in parents and parents[line[-1]] not in line:
            line.append(parents[line[-1]])
        # Below the guard, which is a child of the command, there is nothing.
        if any(each in members or each == command for each in line[1:]):
            members.add(pid)
    return [processes[pid] for pid in (members | ending) - strangers]


def end_family(
    command: int, sessions: Collection[int], mark: str, within_seconds: float, spared: Collection[int] = ()
) -> None:
    """Kill the command's family but for those that are `spared`, again until a look finds nobody, or for so long: who
    is killed may be replaced by a parent that is not yet.

    The resource tracker of `multiprocessing` removes what the others leave in /dev/shm when the last of them has ended,
    the command too: it is woken up where it is stopped, and has a second for that once the command is gone.
    """
    deadline = time.monotonic() + within_seconds
    tracker_deadline = time.monotonic() + _TRACKER_SECONDS
    left_out = set(spared)
    while family := [each for each in find_family(command, sessions, mark) if each.pid not in left_out]:
        for process in family:
            with suppress(psutil.Error, OSError):
                if _is_resource_tracker(process):
                    process.send_signal(signal.SIGCONT)
                    if command == os.getpid():  # it cannot end before the command
                        left_out.add(process.pid)
                        continue
                    if time.monotonic() < tracker_deadline:
                        continue
                process.kill()
        if time.monotonic() > deadline:
            return
        time.sleep(_AGAIN_SECONDS)


def _is_resource_tracker(process: psutil.Process) -> bool:
    return "multiprocessing.resource_tracker" in " ".join(process.cmdline())


def _has_threads(zombie: int) -> bool:
    """Is a process whose main thread has ended still ending others? Until they have, it holds its files and locks."""
    with suppress(OSError):
        return len(list(Path(f"/proc/{zombie}/task").iterdir())) > 1
    return False


def _is_ending(pid: int) -> bool:
    """Has the kernel begun to take this process apart? Unknown, and so no, on systems without /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(after_name[6]) & _IS_EXITING)


def _read_environment(pid: int) -> bytes:
    """The environment that a process was started with; nothing where it cannot be read, as on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
