"""A lock file with a lease: one writer per artifact, across processes and machines.

The lock names its holder. On the same node the holder is alive as long as its process is. A holder elsewhere is judged
by change alone: it counts upwards in the lock, and is dead once a reader has seen nothing change for LEASE_SECONDS of
the reader's own monotonic clock. No time that one machine wrote is compared with another's clock, so that clocks may
be wrong and may be set. A holder of an earlier attempt is not waited for: what starts attempts begins one when it has
seen the end of the one before, or has given it up (`attempt.py`).

A holder that is frozen, or cut off from the file system, loses its lease all the same and may wake up. So every writer
works in folders of its own, and `Lease.require` is the fence before anything becomes visible to others.

flock alone would do on one machine; a Lustre mount without the `flock` option refuses it.
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
from pathlib import Path
from typing import NamedTuple, TypeVar

from services.common.artifacts.attempt import Attempt, this_attempt
from services.common.artifacts.process import ProcessName, is_running, this_process
from services.common.errors import TRANSIENT_ERRNOS, ArtifactError, Interrupted, TryAgain
from services.common.input.files import InputFileError, open_regular_file

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_SECONDS = 60.0
BEATS_PER_LEASE = 6
POLL_SECONDS = 0.2

_MAX_LOCK_BYTES = 4096

# Tokens of this process. A lock that names this process and none of them was left by a release that failed.
_own_tokens: set[str] = set()


class LockUnreadable(TryAgain):
    """The file system did not answer for too long."""


class LeaseTaken(TryAgain):
    """Somebody else holds the lease, and it was not to be waited for."""


@dataclass(frozen=True)
class Lease:
    """The right to write under the lock `path`: a value that can be handed to other processes."""

    path: Path
    token: str

    @property
    def writer(self) -> str:
        """Eight hexadecimal digits for the names of what this writer alone writes."""
        return self.token[:8]

    def is_held(self) -> bool:
        """Raises `TryAgain` when the lock cannot be read for LEASE_SECONDS."""
        owner = _keep_trying(lambda: _read_owner(self.path), self.path)
        return owner is not None and owner.token == self.token

    def require(self) -> None:
        """Raise `TryAgain` when another writer took over while this one was frozen, or a newer attempt of its run."""
        if not self.is_held():
            raise self.lost()

    def lost(self) -> TryAgain:
        return TryAgain(
            f"{self.path}: the lease was lost to another writer: this one was silent for too long (frozen, asleep, "
            f"or cut off from the file system). It has published nothing since. The same command continues."
        )


class HeldLease:
    """A lease as its holder sees it: its token may be replaced."""

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
        """Another token for the same holder: what was handed out before does not hold the lease any more.

        Raises `TryAgain` when the lease is lost.
        """
        new = replace(self._owner, token=uuid.uuid4().hex)
        _own_tokens.add(new.token)
        if not _keep_trying(lambda: self._rewrite(new), self.path):
            raise self.lost()
        self.lease.require()  # the lock may have been moved away while it was written
        return self.lease

    def beat(self) -> bool:
        """Change the lock for everyone to see; False when it is somebody else's, or gone."""
        return self._rewrite(self._owner)

    def try_acquire(self, watch: LockWatch) -> bool:
        """One attempt. Raises `OSError` for whatever the file system says."""
        state = watch.poll()
        if watch.token == self._owner.token:  # linked before, and the answer was lost
            return True
        if state in (LockState.HELD, LockState.UNKNOWN):
            return False
        if state is LockState.DEAD:
            dead = watch.found
            logger.info("%s: taken over from %s, which is over", self.path.with_suffix(""), watch.holder)
            _take_away(self.path, self._beside("dead"), lambda found: found == dead)
        return self._link()

    def release(self) -> None:
        """Remove the lock, unless it is somebody else's by now."""
        try:
            _keep_trying(self._remove, self.path, LEASE_SECONDS / BEATS_PER_LEASE)
        except (LockUnreadable, OSError) as error:
            logger.warning("%s stays behind and is taken over: %s", self.path, error)
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
        """Write into the lock file itself, whatever its name is by now: a path could have become somebody else's."""
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
                os.pwrite(descriptor, new.encode(self._beats), 0)  # of the same length: never torn to another's eyes
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
    """By a process of this node that is there."""
    UNKNOWN = enum.auto()
    """Held elsewhere, as far as anybody here knows yet."""
    DEAD = enum.auto()
    """Its holder is gone."""


class ChangeWatch:
    """Looks at something again and again, and tells for how long it has been the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_changed = False
        self._seen: Hashable = None
        self._since: float | None = None

    def poll(self) -> LockState:
        """Raises `OSError` where it cannot be read: that is no change, and no silence either."""
        began = time.monotonic()  # before, so that a process which is stopped in here does not count that as silence
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
        """None when there is nothing."""
        raise NotImplementedError

    def _ask(self) -> bool | None:
        """Whether the writer is alive, where that is known at once."""
        return None


class LockWatch(ChangeWatch):
    """Watches a lock file, or another file with an owner's name in it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.found: _LockFile | None = None
        self._owner: _Owner | None = None

    @property
    def token(self) -> str | None:
        return self._owner.token if self._owner else None

    @property
    def holder(self) -> str:
        """For a message."""
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
            return False  # also where it still runs: it was given up, and the fence holds it off from now on
        return is_running(self._owner.process)


class FolderWatch(ChangeWatch):
    """Watches what is in a folder."""

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
    """Those that nobody holds or changes.

    Where only silence can tell, all are watched together; `tell` is called before, with their number and the seconds.
    Raises `TryAgain` where one cannot be read for LEASE_SECONDS.
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
    """Hold the lock file `path`, waiting for a live holder to finish, or raising `LeaseTaken` when not to wait.

    `watch` is what the caller has seen of the lock already.
    Raises `TryAgain` when the file system does not let the lock be read or made for LEASE_SECONDS, and instead of what
    the body raises when the lease is lost by then.
    """
    held = HeldLease(path)
    stop = threading.Event()
    beat = threading.Thread(target=_keep_beating, args=(held, stop), name="lease", daemon=True)
    try:
        _acquire(held, watch or LockWatch(path), waits)
        beat.start()
        with naming_a_lost_lease(held):
            yield held
    finally:
        stop.set()
        if beat.is_alive():
            beat.join()
        held.release()


@contextmanager
def naming_a_lost_lease(lease: Lease | HeldLease) -> Iterator[None]:
    """Let what fails because another writer took over, and cleaned up, end with `TryAgain`."""
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


def _keep_beating(held: HeldLease, stop: threading.Event) -> None:
    while not stop.wait(LEASE_SECONDS / BEATS_PER_LEASE):
        try:
            if not held.beat():
                logger.warning("%s: the lease was lost to another writer; nothing will be published", held.path)
                return
        except OSError as error:  # a network file system may miss a beat
            logger.debug("%s: missed a beat: %s", held.path, error)


def _keep_trying(attempt: Callable[[], T], path: Path, seconds: float | None = None) -> T:
    """The result of `attempt`, again and again while the file system says nothing.

    Raises `TryAgain` after LEASE_SECONDS, or `seconds`, of that.
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
                    f"{path}: the file system answers with {error.strerror!r} since {patience:.0f} s, so nobody can "
                    f"tell who may write. Look after the mount; the same command continues."
                ) from error
        time.sleep(POLL_SECONDS)


def _take_away(path: Path, aside: Path, is_doomed: Callable[[_LockFile], bool]) -> None:
    """Remove the lock `path` if it is doomed, and nothing else.

    It is moved aside first: between reading a path and removing it, it can become somebody else's.
    """
    found = _read_lock(path)
    if found and is_doomed(found):
        with suppress(FileNotFoundError):  # also the answer to a request that was sent twice
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
    """None when there is no such file.

    Through `open`: a network file system asks its server then, and answers a `stat` from its memory for a minute.
    """
    try:
        with open_regular_file(path) as file:
            return _LockFile(file.read(_MAX_LOCK_BYTES), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError as error:
        if path.is_symlink():  # nothing can be made there, and a writer would be waited for that does not exist
            raise ArtifactError(
                f"{path}: a link to nothing: a lock belongs there. Move it away: `mv {path} {path}.aside`."
            ) from error
        return None
    except InputFileError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL, errno.ELOOP):
            raise
        raise ArtifactError(
            f"{path}: {error.strerror}: a lock belongs there. Move it away: `mv {path} {path}.aside`."
        ) from error


@dataclass(frozen=True)
class _Owner:
    token: str
    process: ProcessName
    attempt: Attempt | None = None

    def encode(self, beats: int) -> bytes:
        """Of the same length for every token and count."""
        process = self.process
        fields = {"token": self.token, "node": process.node, "pid": process.pid, "started": process.started}
        fields["attempt"] = str(self.attempt or "")
        return json.dumps({**fields, "beats": f"{beats % 10**12:012d}"}).encode()

    @classmethod
    def decode(cls, content: bytes) -> _Owner | None:
        """None for what is not a lock's content, as a machine that lost power leaves it."""
        try:
            fields = json.loads(content)
            token, node, pid, started = (fields[key] for key in ("token", "node", "pid", "started"))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not (isinstance(token, str) and isinstance(node, str) and type(pid) is int and 0 < pid < 2**31):
            return None
        # Versions before wrote a time of day as a number: of theirs, only changes are believed.
        process = ProcessName(node, pid, started if isinstance(started, str) else None)
        attempt = fields.get("attempt", "")
        return cls(token, process, Attempt.parse(attempt) if isinstance(attempt, str) else None)
