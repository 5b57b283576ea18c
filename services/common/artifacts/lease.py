"""Leases by lock files: one writer for each artifact, across processes and machines.

The lock names its holder. On the same node the holder is alive as long as its process is. A holder on another node is
judged by change alone: it counts upwards in the lock, and is dead once a reader has seen no change for LEASE_SECONDS of
the reader's own monotonic clock. No time that one machine wrote is compared with the clock of another, so clocks may be
wrong and may be set. Nobody waits for the holder of an earlier attempt, because a scheduler begins an attempt only when
the one before has ended or was given up (`attempt.py`).

A holder that is frozen, or cut off from the file system, loses its lease, too, and may wake up later. So every writer
works in folders of its own, and calls the fence `Lease.require` before anything becomes visible to others.

flock would be enough on one machine, but a Lustre mount without the option `flock` refuses it.
"""

from __future__ import annotations

import enum
import errno
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from services.common.artifacts.attempt import Attempt, this_attempt
from services.common.artifacts.process import ProcessName, is_running, this_process
from services.common.errors import TRANSIENT_ERRNOS, ArtifactError, Interrupted, TryAgain
from services.common.input.files import InputFileError, open_regular_file
from services.common.process.background_thread import running_in_background

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_SECONDS = 60.0
BEATS_PER_LEASE = 6
POLL_SECONDS = 0.2

_MAX_LOCK_BYTES = 4096

# Tokens of this process. A lock that names this process and no such token was left by a release that failed.
_own_tokens: set[str] = set()


class LockUnreadable(TryAgain):
    """The file system has not answered for too long."""


class LeaseTaken(TryAgain):
    """Another process holds the lease, and the caller did not want to wait."""


@dataclass(frozen=True)
class Lease:
    """The right to write under the lock `path`. It is a value that other processes can be given."""

    path: Path
    token: str

    @property
    def writer(self) -> str:
        """Eight hexadecimal digits for the names of files and folders that only this writer uses."""
        return self.token[:8]

    def is_held(self) -> bool:
        """Tell whether the lock has this token. Raises `TryAgain` where it cannot be read for LEASE_SECONDS."""
        owner = _keep_trying(lambda: _read_owner(self.path), self.path)
        return owner is not None and owner.token == self.token

    def require(self) -> None:
        """Raise `TryAgain` where another writer, or a later attempt, took over while this one was frozen."""
        if not self.is_held():
            raise self.lost()

    def lost(self) -> TryAgain:
        return TryAgain(
            f"{self.path}: the lease was lost to another writer, because this one was silent for too long (frozen, "
            f"asleep, or cut off from the file system). It has published nothing since. The same command continues."
        )


class HeldLease:
    """The holder's own object for a lease, whose token it may replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner = _Owner(uuid.uuid4().hex, this_process(), this_attempt())
        self._beats = 0
        self._mutex = threading.Lock()
        _own_tokens.add(self._owner.token)

    @property
    def lease(self) -> Lease:
        return Lease(self.path, self._owner.token)

    def is_held(self) -> bool:
        return self.lease.is_held()

    def lost(self) -> TryAgain:
        return self.lease.lost()

    def renew(self) -> Lease:
        """Replace the token; processes with the lease of the old token do not hold it any more.

        Raises `TryAgain` where the lease is lost.
        """
        new = replace(self._owner, token=uuid.uuid4().hex)
        _own_tokens.add(new.token)
        if not _keep_trying(lambda: self._rewrite(new), self.path):
            raise self.lost()
        self.lease.require()  # the lock may have been moved away while it was written
        return self.lease

    def beat(self) -> bool:
        """Count upwards in the lock; False where the lock is gone or belongs to another writer."""
        return self._rewrite(self._owner)

    def try_acquire(self, watch: LockWatch) -> bool:
        """Try once to make the lock, or to take over that of a dead holder. Raises the file system's `OSError`."""
        state = watch.poll()
        if watch.token == self._owner.token:  # linked before, and the answer was lost
            return True
        if state in (LockState.HELD, LockState.UNKNOWN):
            return False
        if state is LockState.DEAD:
            dead = watch.found
            logger.info("%s: taken over from %s, which has ended", self.path.with_suffix(""), watch.holder)
            _take_away(self.path, self._beside("dead"), lambda found: found == dead)
        return self._link()

    def release(self) -> None:
        """Remove the lock unless it belongs to another writer by now."""
        try:
            _keep_trying(self._remove, self.path, LEASE_SECONDS / BEATS_PER_LEASE)
        except (LockUnreadable, OSError) as error:
            logger.warning("%s could not be removed; the next writer takes it over: %s", self.path, error)
        finally:
            _own_tokens.discard(self._owner.token)

    def _link(self) -> bool:
        # Written aside and linked, so that the lock is never seen half-written.
        draft = self._beside("")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(self._owner.encode(self._beats))
            os.link(draft, self.path)
        except FileNotFoundError:  # somebody cleaned up meanwhile
            return False
        except FileExistsError:  # also the answer to a request that was sent twice, and done the first time
            owner = _read_owner(self.path)
            return owner is not None and owner.token == self._owner.token
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return True

    def _rewrite(self, new: _Owner) -> bool:
        """Write into the open lock file, whatever its name is by now: another writer's lock may be at the path."""
        with self._mutex:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # a read of a pipe would not end
            except FileNotFoundError:
                return False
            try:
                found = _Owner.decode(os.read(descriptor, _MAX_LOCK_BYTES))
                if found is None or found.token not in (self._owner.token, new.token):
                    return False
                self._beats += 1
                os.pwrite(descriptor, new.encode(self._beats), 0)  # of the same length: no reader sees half of it
            finally:
                os.close(descriptor)  # a network file system shows it to others from here on
            if new != self._owner:
                _own_tokens.discard(self._owner.token)
                self._owner = new
            return True

    def _remove(self) -> None:
        def is_own(found: _LockFile) -> bool:
            owner = _Owner.decode(found.content)
            return owner is not None and owner.token == self._owner.token

        _take_away(self.path, self._beside("released"), is_own)

    def _beside(self, what: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{what}{'-' if what else ''}{self._owner.token}")


class LockState(enum.Enum):
    FREE = enum.auto()
    HELD = enum.auto()
    """A running process of this node holds it."""
    UNKNOWN = enum.auto()
    """The holder is on another node or cannot be seen, and has not been silent for long enough yet."""
    DEAD = enum.auto()
    """The holder has ended, or has been silent for LEASE_SECONDS."""


class ChangeWatch:
    """Looks at a path again and again, and measures for how long it has not changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_changed = False
        self._seen: Hashable = None
        self._since: float | None = None

    def poll(self) -> LockState:
        """Look once and return the state. Raises `OSError` where the path cannot be read, which is no silence."""
        began = time.monotonic()  # before the look: a process that is stopped in it does not count that as silence
        seen = self._observe()
        if seen is None:
            self._seen = self._since = None
            return LockState.FREE
        if self._since is None or seen != self._seen:
            self.has_changed = self._since is not None
            self._seen, self._since = seen, time.monotonic()
        is_alive = self._ask()
        if is_alive is None:
            return LockState.DEAD if began - self._since >= LEASE_SECONDS else LockState.UNKNOWN
        return LockState.HELD if is_alive else LockState.DEAD

    def _observe(self) -> Hashable:
        """Return a value that differs once the path has changed; None where there is nothing at the path."""
        raise NotImplementedError

    def _ask(self) -> bool | None:
        """Return whether the writer is alive; None where only silence can tell."""
        return None


class LockWatch(ChangeWatch):
    """Watches a lock file, or a draft of one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.found: _LockFile | None = None
        self._owner: _Owner | None = None

    @property
    def token(self) -> str | None:
        return self._owner.token if self._owner else None

    @property
    def holder(self) -> str:
        """Name of the holder for a message."""
        process = self._owner.process if self._owner else None
        return f"process {process.pid} on {process.node.partition(' ')[0]!a}" if process else "another process"

    def _observe(self) -> Hashable:
        self.found = _read_lock(self.path)
        self._owner = _Owner.decode(self.found.content) if self.found else None
        return self.found

    def _ask(self) -> bool | None:
        if self._owner is None:
            return None
        if self._owner.process == this_process():
            return self._owner.token in _own_tokens
        attempt = this_attempt()
        if attempt and self._owner.attempt and attempt.follows(self._owner.attempt):
            return False  # even where it still runs: it was given up, and the fence stops it from now on
        return is_running(self._owner.process)


class FolderWatch(ChangeWatch):
    """Watches the content of a folder."""

    def _observe(self) -> Hashable:
        if not self.path.exists():
            return None
        seen = []
        for path in sorted(self.path.rglob("*")):
            with suppress(FileNotFoundError):
                status = path.lstat()
                seen.append((str(path), status.st_size, status.st_mtime_ns))
        return tuple(seen)


def find_idle(watches: Iterable[ChangeWatch], tell: Callable[[int, float], None]) -> list[ChangeWatch]:
    """Return the watches whose path nobody holds or changes.

    Where only silence can tell, all are watched together for LEASE_SECONDS, and `tell` is called before with their
    number and these seconds. Raises `TryAgain` where a path cannot be read for as long.
    """
    idle: list[ChangeWatch] = []
    waiting = list(watches)
    is_told = False
    while waiting:
        unknown = []
        for watch in waiting:
            state = _keep_trying(watch.poll, watch.path)
            if state in (LockState.FREE, LockState.DEAD):
                idle.append(watch)
            elif state is LockState.UNKNOWN and not watch.has_changed:
                unknown.append(watch)
        waiting = unknown
        if waiting and not is_told:
            tell(len(waiting), LEASE_SECONDS)
            is_told = True
        if waiting:
            time.sleep(POLL_SECONDS)
    return idle


@contextmanager
def hold_lease(path: Path, watch: LockWatch | None = None, *, waits: bool = True) -> Iterator[HeldLease]:
    """Hold the lock file `path` during the block, after waiting for a live holder.

    Where `waits` is False, a live holder raises `LeaseTaken` instead. `watch` is the caller's earlier watch of the
    lock. Raises `TryAgain` where the lock cannot be read or made for LEASE_SECONDS, and in place of the block's own
    error where the lease was lost by then.
    """
    held = HeldLease(path)
    try:
        _acquire(held, watch or LockWatch(path), waits)
        with running_in_background(partial(_keep_beating, held), "lease"), naming_a_lost_lease(held):
            yield held
    finally:
        held.release()


@contextmanager
def naming_a_lost_lease(lease: Lease | HeldLease) -> Iterator[None]:
    """Raise `TryAgain` in place of an error of the block where another writer took over and cleaned up."""
    try:
        yield
    except (TryAgain, Interrupted):
        raise
    except Exception as error:
        if not lease.is_held():
            raise lease.lost() from error
        raise


def _acquire(held: HeldLease, watch: LockWatch, waits: bool) -> None:
    is_told = False
    while not _keep_trying(lambda: held.try_acquire(watch), held.path):
        if not waits:
            raise LeaseTaken(f"{held.path}: held by another process")
        if not is_told:
            logger.info("%s is being written by %s; waiting for it", held.path.with_suffix(""), watch.holder)
            is_told = True
        time.sleep(POLL_SECONDS)


def _keep_beating(held: HeldLease, is_over: threading.Event) -> None:
    while not is_over.wait(LEASE_SECONDS / BEATS_PER_LEASE):
        try:
            if not held.beat():
                logger.warning("%s: the lease was lost to another writer; nothing will be published", held.path)
                return
        except OSError as error:  # a network file system may fail for a moment
            logger.debug("%s: missed a beat: %s", held.path, error)


def _keep_trying(attempt: Callable[[], T], path: Path, seconds: float | None = None) -> T:
    """Return the result of `attempt`, which is called again while the file system does not answer.

    Raises `LockUnreadable` once that has lasted for `seconds`, by default LEASE_SECONDS.
    """
    patience = LEASE_SECONDS if seconds is None else seconds
    failing_since: float | None = None
    while True:
        try:
            return attempt()
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                raise
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since >= patience:
                raise LockUnreadable(
                    f"{path}: the file system has answered {error.strerror!r} for {patience:.0f} s, so that nobody can "
                    f"tell who may write. Repair the mount; the same command continues."
                ) from error
        time.sleep(POLL_SECONDS)


def _take_away(path: Path, aside: Path, is_doomed: Callable[[_LockFile], bool]) -> None:
    """Remove the lock `path` if `is_doomed` says so.

    The file is moved aside first, because another writer's lock may take its place between the look and the removal.
    """
    found = _read_lock(path)
    if found and is_doomed(found):
        with suppress(FileNotFoundError):  # it is also the answer to a request that was sent twice
            path.rename(aside)
    moved = _read_lock(aside)
    if moved is None:
        return
    if not is_doomed(moved):
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _read_owner(path: Path) -> _Owner | None:
    found = _read_lock(path)
    return _Owner.decode(found.content) if found else None


class _LockFile(NamedTuple):
    content: bytes
    mtime_ns: int


def _read_lock(path: Path) -> _LockFile | None:
    """Return the content of a lock file; None where there is no such file.

    It is opened, because a network file system then asks its server; it may answer a `stat` from a cache for a minute.
    """
    try:
        with open_regular_file(path) as file:
            return _LockFile(file.read(_MAX_LOCK_BYTES), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError as error:
        if path.is_symlink():  # no lock can be made there, and nobody holds one
            raise ArtifactError(
                f"{path}: a link to nothing, in the place of a lock. Move it away: `mv {path} {path}.aside`."
            ) from error
        return None
    except InputFileError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL, errno.ELOOP):
            raise
        raise ArtifactError(
            f"{path}: {error.strerror}, in the place of a lock. Move it away: `mv {path} {path}.aside`."
        ) from error


@dataclass(frozen=True)
class _Owner:
    token: str
    process: ProcessName
    attempt: Attempt | None = None

    def encode(self, beats: int) -> bytes:
        """Return the lock's content, whose length is the same for every token and count."""
        process = self.process
        fields = {"token": self.token, "node": process.node, "pid": process.pid, "started": process.started}
        fields["attempt"] = str(self.attempt or "")
        return json.dumps({**fields, "beats": f"{beats % 10**12:012d}"}).encode()

    @classmethod
    def decode(cls, content: bytes) -> _Owner | None:
        """Parse a lock's content; None for anything else, such as the half of it that a power failure left."""
        try:
            fields = json.loads(content)
            token, node, pid, started, attempt = (fields[key] for key in ("token", "node", "pid", "started", "attempt"))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not (isinstance(token, str) and isinstance(node, str) and type(pid) is int and 0 < pid < 2**31):
            return None
        process = ProcessName(node, pid, started if isinstance(started, str) else None)
        return cls(token, process, Attempt.parse(attempt) if isinstance(attempt, str) else None)
