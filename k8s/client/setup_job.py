"""Runs a Job that prepares the cluster, such as its shared file system, before the RayCluster is applied."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress

from deploy.progress import ProgressPrinter
from k8s.objects.api import Api, Object, has_condition
from k8s.objects.placement import explain_start
from services.common.errors import DeviceError, TryAgain

SETUP_SECONDS = 900.0
POLL_SECONDS = 1.0


def run_setup_job(api: Api, job: Object) -> str:
    """Run the Job under a name of its own to its end: the last line of its log.

    Raises `DeviceError` with that line where the Job fails, and `TryAgain` where it does not end.
    """
    name = f"{job['metadata']['name']}-{secrets.token_hex(3)}"
    api.create(job | {"metadata": job["metadata"] | {"name": name}})
    deadline = time.monotonic() + SETUP_SECONDS
    report = ProgressPrinter(f"Job {name} has not ended").report
    while True:
        status = (api.find("Job", name) or {}).get("status") or {}
        pods = api.find_all("Pod", f"job-name={name}")  # one for each attempt
        if status.get("succeeded"):
            return _last_line(api, pods)
        if has_condition({"status": status}, "Failed"):
            raise DeviceError(
                f"Job {name} in namespace {api.namespace} failed, and nothing after it was applied: "
                f"{_last_line(api, pods)}. kubectl -n {api.namespace} describe job,pods"
            )
        waits = explain_start(api, pods[-1]) if pods else "it has no pod yet"
        report(waits)
        if time.monotonic() > deadline:
            raise TryAgain(f"Job {name} did not end in {SETUP_SECONDS:.0f} s: {waits}")
        time.sleep(POLL_SECONDS)


def _last_line(api: Api, pods: list[Object]) -> str:
    """Last line of the log of the newest attempt that has one."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True):
        with suppress(DeviceError):  # the container never started
            container = pod["spec"]["containers"][0]["name"]
            if lines := list(api.log(pod["metadata"]["name"], container)):
                return lines[-1].partition(" ")[2]
    return "its log is empty"
