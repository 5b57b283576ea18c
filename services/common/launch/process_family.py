"""Finds the processes that a command has started, whoever their parent is now, and those that are stopped.

A process belongs to a command's family when the command is its ancestor, when it runs in a session that the command
made, or when it was started with the command's mark in its environment. None of the three is enough alone: an orphan
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
"""Environment variable that a command's processes inherit; its value, the mark, is the command's own."""

STOPPED_SECONDS = 5.0
"""Seconds for which a process has to be stopped, by SIGSTOP or SIGTSTP, before it counts as frozen. A slow process is
never in this state, and neither is one that a debugger holds.
"""

_TRACKER_SECONDS = 1.0
_AGAIN_SECONDS = 0.05
_IS_EXITING = 0x4  # PF_EXITING of linux/sched.h, in the flags of proc_pid_stat(5)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process: it does nothing before SIGCONT or SIGKILL."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def find_stopped() -> set[int]:
    """The ids of all processes of this machine that are stopped by a signal."""
    return {pid for pid in psutil.pids() if is_stopped(pid)}


def find_family(command: int, sessions: Collection[int], mark: str) -> list[psutil.Process]:
    """The living processes that the command with process id `command` has started, without itself and this process.

    Included are all processes of this user that are exiting at this moment, whoever started them: they have released
    their environment, may have lost their parent, and hold files and locks until they have exited.
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
                ending.add(process.pid)  # its children may belong to another command
    for pid in parents:
        line = [pid]
        while line[-1] in parents and parents[line[-1]] not in line:
            line.append(parents[line[-1]])
        if any(each in members or each == command for each in line[1:]):
            members.add(pid)
    return [processes[pid] for pid in (members | ending) - {command, os.getpid()}]


def end_family(
    command: int, sessions: Collection[int], mark: str, within_seconds: float, spared: Collection[int] = ()
) -> None:
    """Kill the command's family, except the `spared` process ids, until none is left or `within_seconds` are over.

    The kills are repeated, because a living parent may replace a killed child. The resource tracker of
    `multiprocessing` is killed last: when all other processes have ended, the command too, it removes their semaphores
    from /dev/shm. It gets a SIGCONT, and a second after the command's end.
    """
    deadline = time.monotonic() + within_seconds
    tracker_deadline = time.monotonic() + _TRACKER_SECONDS
    left_out = set(spared)
    while family := [each for each in find_family(command, sessions, mark) if each.pid not in left_out]:
        for process in family:
            with suppress(psutil.Error, OSError):
                if _is_resource_tracker(process):
                    process.send_signal(signal.SIGCONT)
                    if command == os.getpid():  # the tracker ends after the command
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
    """Whether a zombie still has threads other than its main one: until they end, it holds files and locks."""
    with suppress(OSError):
        return len(list(Path(f"/proc/{zombie}/task").iterdir())) > 1
    return False


def _is_ending(pid: int) -> bool:
    """Whether the process has begun to exit. Always False on systems without /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(after_name[6]) & _IS_EXITING)


def _read_environment(pid: int) -> bytes:
    """The environment with which a process was started; empty where it cannot be read, as on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
