"""A run of the reaper outside of its hours."""

from __future__ import annotations

import secrets

from k8s.objects.api import Api, Object
from services.common.errors import DeviceError

REAPER = "reaper"  # the CronJob
KEPT_SECONDS = 900


def start_reaper(api: Api) -> bool:
    """Start the CronJob's Job now. False where that may not be: it comes by itself."""
    try:
        reaper = api.find("CronJob", REAPER)
        if reaper is None:
            return False
        api.create(_job(reaper))
    except DeviceError:  # no right to look at CronJobs, say
        return False
    return True


def _job(reaper: Object) -> Object:
    spec = reaper["spec"]["jobTemplate"]["spec"] | {"ttlSecondsAfterFinished": KEPT_SECONDS}
    metadata = {"name": f"{REAPER}-{secrets.token_hex(3)}", "labels": reaper["metadata"].get("labels") or {}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
