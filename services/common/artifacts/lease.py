"""A lock file with a lease: one writer per artifact, across processes and machines.

The holder refreshes the file's modification time. A lock is free for the taking when its holder is
known to be dead (same machine, no such process) or has been silent for LEASE_SECONDS. flock alone would
do on one machine; a Lustre mount without the `flock` option refuses it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.errors import TryAgain

logger = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
HEARTBEAT_SECONDS = LEASE_SECONDS / 6
POLL_SECONDS = 0.2

Owner = dict[str, str | int | float]
_OWNER_KEYS = {"token", "node", "pid", "started"}


@dataclass(frozen=True)
class Lease:
    path: Path
    token: str

    def is_held(self) -> bool:
        owner = _read_owner(self.path)
        return owner is not None and owner.get("token") == self.token

    def require(self) -> None:
        """Raise `TryAgain` when another writer took over while this one was frozen."""
        if not self.is_held():
            raise TryAgain(f"{self.path}: the lease was lost to another writer. The same command waits for it.")


@contextmanager
def hold_lease(path: Path) -> Iterator[Lease]:
    """Hold the lock file `path`, waiting for a live holder to finish."""
    lease = Lease(path, token=uuid.uuid4().hex)
    said_who = False
    while not _try_acquire(lease):
        if not said_who:
            logger.info("%s is being written by another process; waiting for it", path.with_suffix(""))
            said_who = True
        time.sleep(POLL_SECONDS)
    stop = threading.Event()
    beat = threading.Thread(target=_heartbeat, args=(lease, stop), name="lease", daemon=True)
    beat.start()
    try:
        yield lease
    finally:
        stop.set()
        beat.join()
        if lease.is_held():
            path.unlink(missing_ok=True)


def is_live(path: Path) -> bool:
    """Does a living process hold this lock file?"""
    return _is_alive(_read_owner(path), path)


def _try_acquire(lease: Lease) -> bool:
    own = {"token": lease.token, "node": _node(), **_process_identity(os.getpid())}
    # Written aside and linked, so that the lock is never seen half-written.
    draft = lease.path.with_name(f".{lease.path.name}.{lease.token}")
    try:
        draft.write_text(json.dumps(own), encoding="utf-8")
        if _link(draft, lease.path):
            return True
        owner = _read_owner(lease.path)
        if _is_alive(owner, lease.path):
            return False
        _discard_dead(lease, owner)
        return _link(draft, lease.path)
    finally:
        draft.unlink(missing_ok=True)


def _link(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    return True


def _discard_dead(lease: Lease, dead: Owner | None) -> None:
    """Remove the lock of the holder that was found dead, unless another waiter replaced it since."""
    if _read_owner(lease.path) != dead:
        return
    aside = lease.path.with_name(f".{lease.path.name}.dead-{lease.token}")
    try:
        lease.path.rename(aside)
    except FileNotFoundError:
        return
    if _read_owner(aside) != dead:  # a living waiter's new lock: put it back
        with suppress(FileExistsError):
            os.link(aside, lease.path)
    aside.unlink()


def _heartbeat(lease: Lease, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        with suppress(OSError):  # a network file system may miss a beat
            if lease.is_held():
                os.utime(lease.path)


def _read_owner(path: Path) -> Owner | None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return owner if isinstance(owner, dict) and owner.keys() >= _OWNER_KEYS else None


def _is_alive(owner: Owner | None, path: Path) -> bool:
    if owner is not None and owner["node"] == _node():
        return _is_running(owner)
    return age_seconds(path) < LEASE_SECONDS


def age_seconds(path: Path) -> float:
    """Since the last change of a file; infinite for one that does not exist."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _node() -> str:
    """Names the set of processes among which a process id is unique: machine, boot and container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    if boot.exists():
        parts.append(boot.read_text(encoding="utf-8").strip())
    if namespace.is_symlink():
        parts.append(str(namespace.readlink()))
    return " ".join(parts)


def _process_identity(pid: int) -> dict[str, int | float]:
    return {"pid": pid, "started": psutil.Process(pid).create_time()}


def _is_running(owner: Owner) -> bool:
    pid = int(owner["pid"])
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        # create_time is derived from the boot clock and can differ by a tick between readers.
        return abs(float(_process_identity(pid)["started"]) - float(owner["started"])) < 1.0
    except psutil.NoSuchProcess:
        return False
