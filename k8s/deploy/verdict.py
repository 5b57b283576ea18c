"""What a job's end means: an exit code of ours and one line."""

from __future__ import annotations

import re

from ray.job_submission import JobStatus

from k8s.deploy.api import Object
from k8s.deploy.deployment import EXIT_AGAIN
from k8s.deploy.ray_jobs import DriverState
from services.common.errors import DeviceError

RAYJOB_ENDS = ("Complete", "Failed", "ValidationFailed")
MESSAGE_CHARACTERS = 500


def exit_code_of_driver(driver: DriverState, stop: str) -> tuple[int, str]:
    """Ray's word on a driver that ended. One without an exit code was lost with its node: 75."""
    if driver.status == JobStatus.SUCCEEDED:
        return 0, "done"
    if driver.status == JobStatus.STOPPED:
        return EXIT_AGAIN, f"stopped by {stop or 'a request to Ray'}; the same command continues"
    if driver.exit_code is not None and driver.exit_code > 0:
        return driver.exit_code, last_words(driver.message)
    return EXIT_AGAIN, f"the driver was lost: {last_words(driver.message)}"


def exit_code_of_rayjob(job: Object) -> tuple[int, str]:
    """The operator's word, where Ray cannot be asked any more."""
    status = job.get("status") or {}
    message = str(status.get("message") or status.get("reason") or "no message")
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return DeviceError.exit_code, f"the operator refuses the RayJob: {message}"
    if status.get("jobStatus") == "SUCCEEDED":
        return 0, "done"
    told = re.search(r"failed with exit code (\d+)", message)
    return (int(told[1]) if told else EXIT_AGAIN), last_words(message)


def has_ended(job: Object) -> bool:
    return (job.get("status") or {}).get("jobDeploymentStatus") in RAYJOB_ENDS


def has_run(job: Object) -> bool:
    """Did the operator see the job in Ray once?"""
    return bool((job.get("status") or {}).get("jobStatus"))


def last_words(message: str) -> str:
    """A stage's own error line where there is one, else the end of what was said."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("millrace: "):
            return " ".join(lines[number:]).removeprefix("millrace: ")[:MESSAGE_CHARACTERS]
    return (lines[-1] if lines else "no message")[-MESSAGE_CHARACTERS:]
