"""Derives the exit code and message of an attempt from what Ray or the operator says about its end."""

from __future__ import annotations

import re

from ray.job_submission import JobStatus

from deploy.exit_codes import EXIT_AGAIN, find_error_line, is_tried_again, resolve_exit_code
from k8s.controller.ray_jobs import DriverState
from k8s.objects.api import Object
from k8s.objects.record import Outcome, Record
from services.common.errors import DeviceError

REQUESTED_ENDS = ("Stopped by time limit", "Stopped by stop file")
"""First words of the trainer's message when a time limit or a stop file ended the run."""


def exit_code_of_driver(driver: DriverState, stop: str) -> tuple[int, str]:
    """The exit code and message of an ended driver. A driver without an exit code was lost with its node: 75."""
    if driver.status == JobStatus.SUCCEEDED:
        return 0, "done"
    if driver.status == JobStatus.STOPPED:
        return EXIT_AGAIN, f"stopped by {stop or 'a request to Ray'}; the same command continues"
    exit_code, line = resolve_exit_code(driver.exit_code or None), find_error_line(driver.message)
    return exit_code, line if exit_code == driver.exit_code else f"the driver was lost: {line}"


def exit_code_of_rayjob(job: Object) -> tuple[int, str]:
    """The exit code and message of an ended RayJob, for a driver of which Ray says nothing."""
    status = job.get("status") or {}
    message = str(status.get("message") or status.get("reason") or "no message")
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return DeviceError.exit_code, f"the operator refused the RayJob: {message}"
    if status.get("jobStatus") == "SUCCEEDED":
        return 0, "done"
    found = re.search(r"failed with exit code (\d+)", message)
    return (int(found[1]) if found else EXIT_AGAIN), find_error_line(message)


def count_disturbances(attempts: tuple[Outcome, ...]) -> int:
    """The number of attempts since the last one that committed a new checkpoint, that attempt included."""
    count = 0
    for attempt in reversed(attempts):
        count += 1
        if attempt.progressed:
            break
    return count


def may_try_again(record: Record) -> bool:
    """Whether another attempt follows the last. Retries count disturbances since the newest checkpoint."""
    is_left = count_disturbances(record.attempts) <= record.deployment.retries
    return is_tried_again(record.attempts[-1].exit_code) and is_left and not record.stop


def has_progressed(before: dict[str, int], after: dict[str, int], message: str) -> bool:
    """Whether a disturbed attempt left a newer checkpoint; a time limit or a stop file is no disturbance."""
    is_newer = any(step > before.get(run, -1) for run, step in after.items())
    return is_newer and not message.startswith(REQUESTED_ENDS)
