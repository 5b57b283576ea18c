"""Names the process that wrote a file, and tells without a clock whether that process still runs.

The kernel uses process ids again, so a name also holds the moment at which the process started, in ticks after boot.
psutil's `create_time` is that plus the boot time, which moves with every step of the wall clock.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")  # a zombie waits for its parent alone


@dataclass(frozen=True)
class ProcessName:
    node: str
    """Machine, boot and container, within which a pid is unique."""
    pid: int
    started: str | None
    """Moment of the start, in ticks after boot; None where this process cannot read it."""


def this_process() -> ProcessName:
    found = _read_state(os.getpid()) if not _has_proc() or _is_own_proc() else None
    return ProcessName(node_name(), os.getpid(), found[1] if found else None)


def is_running(process: ProcessName) -> bool | None:
    """Tell whether the process runs; None where it is on another node, or hidden from this user."""
    if process.started is None or process.node != node_name():
        return None
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    found = _read_state(process.pid)
    return None if found is None else found[0] not in _DEAD_STATES and found[1] == process.started


def node_name() -> str:
    """Return the name of this machine, boot and container."""
    boot, namespace = _PROC / "sys/kernel/random/boot_id", _PROC / "self/ns/pid"
    parts = [socket.gethostname()]
    if boot.exists():
        parts.append(boot.read_text(encoding="utf-8").strip())
    if namespace.is_symlink():
        parts.append(str(namespace.readlink()))
    return " ".join(parts)


def _has_proc() -> bool:
    return (_PROC / "self").is_symlink()


def _is_own_proc() -> bool:
    """A new pid namespace may still see its parent's /proc, where its pids name other processes."""
    return str((_PROC / "self").readlink()) == str(os.getpid())


def _read_state(pid: int) -> tuple[str, str] | None:
    """Return the letter of a process's state and its start time; None where this user cannot see the process."""
    try:
        if not _has_proc():  # macOS, where the kernel notes the time of the start once
            process = psutil.Process(pid)
            return "Z" if process.status() == psutil.STATUS_ZOMBIE else "R", f"at {process.create_time()}"
        # Fields 3 and 22 of proc(5); the second one, a name in brackets, may contain anything.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (psutil.Error, FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return fields[0].decode(), f"{int(fields[19])} ticks after boot"
