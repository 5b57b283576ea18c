"""A Job of an overlay that prepares something, such as the shared file system, before the RayCluster is applied."""

from __future__ import annotations

import time
from contextlib import suppress

from deploy.progress import Progress
from k8s.objects.api import Api, Object
from k8s.objects.placement import explain_start
from services.common.errors import DeviceError, TryAgain

SETUP_SECONDS = 900.0
POLL_SECONDS = 1.0


def run_setup_job(api: Api, job: Object) -> str:
    """Run the Job to its end, again where it ran before; the last line of what it said.

    Raises `DeviceError` with its words when it fails, and `TryAgain` when it does not end.
    """
    name = job["metadata"]["name"]
    api.delete("Job", name)
    deadline = time.monotonic() + SETUP_SECONDS
    while api.find("Job", name):
        _require_time(deadline, name, "the one before does not go away")
        time.sleep(POLL_SECONDS)
    api.create(job)
    report = Progress(f"Job {name} has not ended").report
    while True:
        status = (api.find("Job", name) or {}).get("status") or {}
        pods = sorted(api.find_all("Pod", f"job-name={name}"), key=_creation)  # one for each try
        if status.get("succeeded"):
            return _last_line(api, pods)
        if any(each["type"] == "Failed" and each["status"] == "True" for each in status.get("conditions") or []):
            raise DeviceError(
                f"Job {name} in namespace {api.namespace} failed, and nothing after it was applied: "
                f"{_last_line(api, pods)}. kubectl -n {api.namespace} describe job,pods"
            )
        waits = explain_start(api, pods[-1]) if pods else "no pod was made"
        report(waits)
        _require_time(deadline, name, waits)
        time.sleep(POLL_SECONDS)


def _require_time(deadline: float, name: str, waits: str) -> None:
    if time.monotonic() > deadline:
        raise TryAgain(f"Job {name} did not end in {SETUP_SECONDS:.0f} s: {waits}")


def _last_line(api: Api, pods: list[Object]) -> str:
    """Of the newest try that said something."""
    for pod in reversed(pods):
        with suppress(DeviceError):  # of a container that never began
            container = pod["spec"]["containers"][0]["name"]
            if lines := list(api.log(pod["metadata"]["name"], container)):
                return lines[-1].partition(" ")[2]
    return "it said nothing"


def _creation(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))
