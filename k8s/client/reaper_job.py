"""Starts the reaper, a CronJob, outside of its schedule."""

from __future__ import annotations

import secrets

from k8s.objects.api import Api, Object
from services.common.errors import DeviceError

REAPER = "reaper"
"""Name of the CronJob."""
KEPT_SECONDS = 900


def start_reaper(api: Api) -> bool:
    """Start a Job of the reaper now. False where this user may not: the reaper then runs at its scheduled time."""
    try:
        reaper = api.find("CronJob", REAPER)
        if reaper is None:
            return False
        api.create(_job(reaper))
    except DeviceError:  # such as a missing right to read CronJobs
        return False
    return True


def _job(reaper: Object) -> Object:
    spec = reaper["spec"]["jobTemplate"]["spec"] | {"ttlSecondsAfterFinished": KEPT_SECONDS}
    metadata = {"name": f"{REAPER}-{secrets.token_hex(3)}", "labels": reaper["metadata"].get("labels") or {}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
