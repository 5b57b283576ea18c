"""The driver's log: printed as it comes, without Ray's state dumps, and kept whole under the artifact root. Losing it
never fails a run.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from k8s.controller.ray_jobs import RayJobs, RayUnreachable
from services.common.errors import StorageError
from services.common.input.files import open_for_append

LOG_FOLDER = "log"
AGAIN_SECONDS = 1.0
STATE_DUMP = "[state-dump]"  # hundreds of lines, which a raylet's end puts into every driver's log


class Readable:
    """The lines of a text that comes in pieces, without those that are for Ray's developers."""

    def __init__(self) -> None:
        self._rest = ""

    def take(self, text: str) -> str:
        """What can be shown by now: whole lines."""
        *lines, self._rest = (self._rest + text).split("\n")
        return "".join(f"{line}\n" for line in lines if STATE_DUMP not in line)

    def finish(self) -> str:
        """The last line, where no newline ends it."""
        rest, self._rest = self._rest, ""
        return "" if STATE_DUMP in rest else rest


class DriverLog:
    """Follows one submission of one job until it is closed. The stream begins anew when it breaks, the file does not:
    what was written before is skipped, also by another process that goes on with the same job.
    """

    def __init__(self, jobs: RayJobs, job: str, started_at_ms: int, folder: Path) -> None:
        # A job that the operator submitted again after a lost head begins its log anew, hence the time in the name.
        self.path = folder / f"{job}-{started_at_ms}.log"
        self._jobs, self._job = jobs, job
        self._closing = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._follow, name="driver-log", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Take what the stream still has, for so long."""
        self._closing.set()
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Write nothing more: the job was submitted anew, and a stream of that name is the new one's."""
        self._is_abandoned = True
        self._closing.set()

    def _follow(self) -> None:
        is_last = is_broken = False
        while not is_last and not self._is_abandoned:
            is_last = self._closing.is_set()  # once more after the job has ended: the stream may have broken before
            try:
                self._copy_stream()
                is_broken = False
            except (RayUnreachable, OSError, StorageError) as error:
                if not is_broken and not self._is_abandoned:
                    is_rays = isinstance(error, RayUnreachable)  # whose words are about its WebSocket
                    why = "" if is_rays else f": {error}"
                    print(f"deploy: the log stream broke, the run goes on{why}", file=sys.stderr, flush=True)
                is_broken = True
            self._closing.wait(AGAIN_SECONDS)

    def _copy_stream(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.stat().st_size if self.path.exists() else 0
        position = 0
        readable = Readable()
        with open_for_append(self.path) as file:

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
