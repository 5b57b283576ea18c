"""Reads jobs, nodes and driver logs of a Ray cluster from its head, which may not answer for a while."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests
from ray.job_submission import JobStatus, JobSubmissionClient

PORT = 8265
TIMEOUT_SECONDS = 15


class RayUnreachable(Exception):
    """The Ray head does not answer, because it is starting or lost."""


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
        answer = self._get(f"/api/jobs/{name}")
        if answer.status_code == 404:
            return None
        job = _json_of(answer)
        return DriverState(
            JobStatus(job["status"]), job.get("driver_exit_code"), job.get("message") or "", job.get("start_time") or 0
        )

    def stop(self, name: str) -> None:
        """Send the driver SIGTERM; Ray kills it after RAY_JOB_STOP_WAIT_TIME_S. Raises `RayUnreachable`."""
        _json_of(self._request("POST", f"/api/jobs/{name}/stop"))

    def find_addresses(self, resource: str) -> set[str]:
        """List the IP addresses of the live Ray nodes that declare the resource. Raises `RayUnreachable`."""
        answer = self._get("/api/v0/nodes?detail=true&limit=10000")
        nodes = _json_of(answer)["data"]["result"]["result"]
        return {
            str(node["node_ip"])
            for node in nodes
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

    def _get(self, path: str) -> requests.Response:
        return self._request("GET", path)

    def _request(self, method: str, path: str) -> requests.Response:
        try:
            return requests.request(method, self.address + path, headers=self._headers, timeout=TIMEOUT_SECONDS)
        except requests.RequestException as error:
            raise RayUnreachable(f"{self.address} does not answer: {error}") from error


def _json_of(answer: requests.Response) -> Any:
    if answer.status_code != 200:
        raise RayUnreachable(f"{answer.url} answered {answer.status_code}: {answer.text[:300]}")
    try:
        return answer.json()
    except ValueError as error:
        raise RayUnreachable(f"{answer.url} did not answer with JSON: {answer.text[:300]}") from error
