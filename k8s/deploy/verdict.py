"""What a job's end means: an exit code of ours and one line."""

from __future__ import annotations

import enum
import re

from ray.job_submission import JobStatus

from k8s.deploy.api import Object
from k8s.deploy.deployment import EXIT_AGAIN, Deployment, Ending, Mode, Record
from k8s.deploy.names import NODES_KEY
from k8s.deploy.ray_jobs import DriverState
from services.common.errors import DeviceError


class Phase(enum.Enum):
    """Where an attempt stands."""

    DRIVER_ENDED = enum.auto()
    RAYJOB_ENDED = enum.auto()
    """Says the operator; Ray cannot be asked any more."""
    STOPPED_BEFORE_RUN = enum.auto()
    STOPPING = enum.auto()
    PENDING = enum.auto()
    """Ray has the job and no resource for its driver."""
    RUNNING = enum.auto()
    ISOLATED_START = enum.auto()
    HEAD_LOST = enum.auto()
    SUBMITTING = enum.auto()
    """Ray does not know the job: not yet, or not any more, since the operator submits it again to a new head."""


RAYJOB_ENDS = ("Complete", "Failed", "ValidationFailed")
MESSAGE_CHARACTERS = 500
WISHED_ENDS = ("Stopped by time limit", "Stopped by stop file")  # the trainer's words


def phase_of(job: Object, driver: DriverState | None, is_ray_there: bool, stop: str, mode: Mode) -> Phase:
    """From the RayJob, from what Ray says of it (None: nothing), and from the wish that it stop."""
    if driver:
        if driver.status.is_terminal():
            return Phase.DRIVER_ENDED
        if stop:
            return Phase.STOPPING
        return Phase.PENDING if driver.status == JobStatus.PENDING else Phase.RUNNING
    if has_ended(job):
        return Phase.RAYJOB_ENDED
    if stop and not has_run(job):
        return Phase.STOPPED_BEFORE_RUN
    if mode == "isolated" and not has_run(job):
        return Phase.ISOLATED_START
    return Phase.SUBMITTING if is_ray_there else Phase.HEAD_LOST


def nodes_of(job: Object, deployment: Deployment) -> int:
    """Nodes on which the RayJob's attempt runs."""
    return int(job["spec"].get("metadata", {}).get(NODES_KEY) or deployment.nodes)


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


def disturbances(attempts: tuple[Ending, ...]) -> int:
    """Attempts since a new checkpoint was committed, and the one that did it: each of them was disturbed."""
    count = 0
    for attempt in reversed(attempts):
        count += 1
        if attempt.progressed:
            break
    return count


def may_try_again(record: Record) -> bool:
    """Retries count disturbances: after a new checkpoint the count starts again."""
    is_left = disturbances(record.attempts) <= record.deployment.retries
    return record.attempts[-1].exit_code == EXIT_AGAIN and is_left and not record.stop


def has_progressed(before: dict[str, int], after: dict[str, int], message: str) -> bool:
    """Is there a newer checkpoint? A run that was told to end, by its time limit or a stop file, was not disturbed."""
    is_newer = any(step > before.get(run, -1) for run, step in after.items())
    return is_newer and not message.startswith(WISHED_ENDS)


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
