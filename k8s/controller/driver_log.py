"""Follows the driver's log: prints it without Ray's state dumps, and writes all of it below the artifact root.

A lost log never fails a run.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from k8s.controller.ray_jobs import RayJobs, RayUnreachable
from services.common.errors import StorageError

LOG_FOLDER = "log"
AGAIN_SECONDS = 1.0
STATE_DUMP = "[state-dump]"
"""The mark of the hundreds of lines that an ending raylet writes into every driver's log."""


class Readable:
    """Filters a text that comes in pieces: it drops the lines of Ray's state dumps."""

    def __init__(self) -> None:
        self._rest = ""

    def take(self, text: str) -> str:
        """Add a piece of text, and return the lines that it completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        return "".join(f"{line}\n" for line in lines if STATE_DUMP not in line)

    def finish(self) -> str:
        """Return the last line if no newline ends it."""
        rest, self._rest = self._rest, ""
        return "" if STATE_DUMP in rest else rest


class DriverLog:
    """Follows one submission of one job until it is closed.

    After a break the stream starts from its beginning, and lines that the file already has are skipped, even if another
    process wrote them.
    """

    def __init__(self, jobs: RayJobs, job: str, started_at_ms: int, folder: Path) -> None:
        # A job that the operator submits to a new head starts a new log, hence the time in the name.
        self.path = folder / f"{job}-{started_at_ms}.log"
        self._jobs, self._job = jobs, job
        self._closing = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._follow, name="driver-log", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Read the rest of the stream for at most `timeout_seconds`, then stop."""
        self._closing.set()
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Stop at once, because the stream of this job now belongs to a new submission."""
        self._is_abandoned = True
        self._closing.set()

    def _follow(self) -> None:
        is_last = is_broken = False
        while not is_last and not self._is_abandoned:
            is_last = self._closing.is_set()  # read once more after the end: the stream may have broken before
            try:
                self._copy_stream()
                is_broken = False
            except (RayUnreachable, OSError, StorageError) as error:
                if not is_broken and not self._is_abandoned:
                    is_rays = isinstance(
                        error, RayUnreachable
                    )  # its message is about a WebSocket, and says nothing more
                    why = "" if is_rays else f": {error}"
                    print(f"deploy: the log stream broke; the run continues{why}", file=sys.stderr, flush=True)
                is_broken = True
            self._closing.wait(AGAIN_SECONDS)

    def _copy_stream(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.stat().st_size if self.path.exists() else 0
        position = 0
        readable = Readable()
        with self.path.open("ab") as file:

            def write(text: str) -> None:
                nonlocal position
                if self._is_abandoned:
                    raise RayUnreachable("abandoned")
                data = text.encode()
                new = data[max(0, written - position) :]
                position += len(data)
                if new:
                    file.write(new)
                    file.flush()
                    sys.stdout.write(readable.take(new.decode(errors="replace")))
                    sys.stdout.flush()

            try:
                self._jobs.follow_log(self._job, write)
            finally:
                sys.stdout.write(readable.finish())
                sys.stdout.flush()
