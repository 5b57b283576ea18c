"""Reads jobs, nodes and driver logs of a Ray cluster from its head, which may not answer for a while."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from ray.job_submission import JobStatus, JobSubmissionClient

from services.common.errors import StorageError, TryAgain

PORT = 8265
TIMEOUT_SECONDS = 15


class RayUnreachable(TryAgain):
    """The Ray head does not answer, because it is starting or lost. For such calls Ray's own client has no timeout."""


class _NotFound(RayUnreachable):
    pass


@dataclass(frozen=True)
class DriverState:
    """The state of a job's driver as Ray describes it."""

    status: JobStatus
    exit_code: int | None
    message: str
    started_at_ms: int
    """The start of the driver, which tells a new submission of the same job from an earlier one."""


class RayJobs:
    """The Jobs API of one Ray cluster."""

    def __init__(self, cluster: str, namespace: str) -> None:
        self.address = f"http://{cluster}-head-svc.{namespace}.svc:{PORT}"
        token = os.environ.get("RAY_AUTH_TOKEN")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def find(self, name: str) -> DriverState | None:
        """Read the state of a job; None when Ray does not know it. Raises `RayUnreachable`."""
        try:
            job = self._call("GET", f"/api/jobs/{name}")
        except _NotFound:
            return None
        return DriverState(
            JobStatus(job["status"]), job.get("driver_exit_code"), job.get("message") or "", job.get("start_time") or 0
        )

    def stop(self, name: str) -> None:
        """Send the driver SIGTERM; Ray kills it after RAY_JOB_STOP_WAIT_TIME_S. Raises `RayUnreachable`."""
        self._call("POST", f"/api/jobs/{name}/stop")

    def find_addresses(self, resource: str) -> set[str]:
        """List the IP addresses of the live Ray nodes that declare the resource. Raises `RayUnreachable`."""
        answer = self._call("GET", "/api/v0/nodes?detail=true&limit=10000")
        return {
            str(node["node_ip"])
            for node in answer["data"]["result"]["result"]
            if node["state"] == "ALIVE" and resource in (node.get("resources_total") or {})
        }

    def follow_log(self, name: str, write: Callable[[str], None]) -> None:
        """Pass the driver's log from its beginning to `write` until the stream ends. Raises `RayUnreachable`."""

        async def tail() -> None:
            client = JobSubmissionClient(self.address, headers=self._headers)
            async for text in client.tail_job_logs(name):
                write(text)

        try:
            asyncio.run(tail())
        except Exception as error:
            raise RayUnreachable(str(error)) from error

    def _call(self, method: str, path: str) -> Any:
        url = self.address + path
        try:
            answer = requests.request(method, url, headers=self._headers, timeout=TIMEOUT_SECONDS)
            if answer.status_code == 404:
                raise _NotFound(f"{url}: not found")
            answer.raise_for_status()
            return answer.json()
        except requests.RequestException as error:
            raise RayUnreachable(f"{url}: {error}") from error


LOG_FOLDER = "log"
AGAIN_SECONDS = 1.0
STATE_DUMP = "[state-dump]"
"""The mark of the hundreds of lines that an ending raylet writes into every driver's log."""


class DriverLog:
    """Follows one submission of one job until it is closed.

    After a break the stream starts from its beginning, and lines that the file already has are skipped, even if another
    process wrote them.
    """

    def __init__(self, jobs: RayJobs, job: str, started_at_ms: int, folder: Path) -> None:
        # A job that the operator submits to a new head starts a new log, hence the time in the name.
        self.path = folder / f"{job}-{started_at_ms}.log"
        self.submission = (job, started_at_ms)
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
                    why = "" if isinstance(error, RayUnreachable) else f": {error}"  # Ray's is about a WebSocket
                    print(f"deploy: the log stream broke; the run continues{why}", file=sys.stderr, flush=True)
                is_broken = True
            self._closing.wait(AGAIN_SECONDS)

    def _copy_stream(self) -> None:
        """Add to the file what it lacks of the stream, and print that without the lines of Ray's state dumps."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.stat().st_size if self.path.exists() else 0
        position, rest = 0, ""
        with self.path.open("ab") as file:

            def write(text: str) -> None:
                nonlocal position, rest
                if self._is_abandoned:
                    raise RayUnreachable("abandoned")
                data = text.encode()
                new = data[max(0, written - position) :]
                position += len(data)
                file.write(new)
                file.flush()
                *lines, rest = (rest + new.decode(errors="replace")).split("\n")
                show(lines)

            def show(lines: list[str]) -> None:
                print("".join(f"{line}\n" for line in lines if STATE_DUMP not in line), end="", flush=True)

            try:
                self._jobs.follow_log(self._job, write)
            finally:
                show([rest] if rest else [])
