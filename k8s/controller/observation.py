"""The observation of one pass, on which the controller's decision is based, and what follows from it: the state of the
deployment, and the outcome of an attempt. `decision.decide` has the diagram of the states.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Any

from ray.job_submission import JobStatus

from deploy.exit_codes import EXIT_AGAIN, find_error_line, is_tried_again, resolve_exit_code
from k8s.controller.node_pool import PoolState
from k8s.controller.ray_jobs import DriverState
from k8s.objects.api import Object
from k8s.objects.attempt import has_been_submitted, has_ended
from k8s.objects.deployment import Deployment
from k8s.objects.record import Record
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError


class State(enum.Enum):
    """The state of a deployment, which follows from its record, its RayJob and Ray."""

    CLEARING = enum.auto()
    """A RayJob of an earlier attempt or deployment may still run, and keeps the next attempt from starting."""
    PLACING = enum.auto()
    """The gang of the next attempt is being placed: its nodes, its pods and their Ray nodes."""
    STARTING = enum.auto()
    """The attempt has a RayJob, and its driver does not run: the operator has not submitted the job to this Ray head,
    Ray has no resource for it, or the head does not answer."""
    RUNNING = enum.auto()
    """The driver runs."""
    STOPPING = enum.auto()
    """The driver exists, and somebody asked the deployment to stop."""
    STOPPED_BEFORE_RUN = enum.auto()
    """Somebody asked the deployment to stop before Ray knew the attempt's job."""
    ATTEMPT_ENDED = enum.auto()
    """The driver has ended, as Ray says or, where it says nothing about the driver, the operator."""
    NO_ATTEMPT_LEFT = enum.auto()
    """No attempt follows: the last one is not repeated, or somebody asked the deployment to stop before the first."""
    TAKING_DOWN = enum.auto()
    """The outcome is written; RayJobs, pods, PodGroup and nodes go."""


@dataclass(frozen=True)
class Gang:
    """The gang of the next attempt: its pods, their nodes, and how many have joined Ray."""

    nodes: int
    """Number of nodes of the attempt, which after a loss may be fewer than the deployment's."""
    replicas: int
    """Replicas of the worker group."""
    pods: int
    """Number of the stage's pods, terminating pods included."""
    is_up_to_date: bool
    """Whether the worker group of the shared RayCluster has the deployment's image, recipe and drain time."""
    missing: str = ""
    """A sentence about the pods that have not joined Ray; empty when all have."""
    room: int = 0
    """Number of the stage's pods for which the present nodes would have room."""
    pool: PoolState = field(default_factory=PoolState)
    """The state of the node pool that has the nodes."""
    group: WorkerGroup | None = field(default=None, compare=False, repr=False)
    """The worker group as it was read, for the action alone: what it writes is a change of this version."""


@dataclass(frozen=True)
class Observation:
    """A deployment as the controller sees it in one pass. Parts that the state does not need are not read."""

    record: Record
    has_older_rayjobs: bool = False
    """Whether RayJobs of the stage that have not ended keep the next attempt from starting."""
    gang: Gang | None = None
    """The gang of the next attempt; None where an attempt has a RayJob already."""
    rayjob: dict[str, Any] | None = None
    """The RayJob of the attempt that is under way."""
    driver: DriverState | None = None
    """The attempt's driver as Ray describes it; None when Ray does not know it, or does not answer."""
    ray_error: str = ""
    """The error of a Ray head that does not answer; empty when it does."""
    missing: str = ""
    """A sentence about the attempt's pods that are not ready; empty when all are."""
    waited_seconds: float = 0.0
    """Seconds since the deployment entered this state or, in it, since the gang has its size or the job was submitted.
    """

    @property
    def deployment(self) -> Deployment:
        return self.record.deployment

    @property
    def attempt(self) -> int:
        """The number of the attempt that is under way or comes next, from 1."""
        return len(self.record.attempts) + 1

    @property
    def state(self) -> State:
        """The state of the deployment, from the record first, then from Ray, then from the attempt's RayJob."""
        record, rayjob, driver = self.record, self.rayjob, self.driver
        if record.outcome:
            return State.TAKING_DOWN
        if rayjob is None:
            if record.stop or (record.attempts and not may_try_again(record)):
                return State.NO_ATTEMPT_LEFT
            return State.CLEARING if self.has_older_rayjobs else State.PLACING
        if driver.status.is_terminal() if driver else has_ended(rayjob):
            return State.ATTEMPT_ENDED
        if record.stop and driver:
            return State.STOPPING
        if record.stop and not has_been_submitted(rayjob):
            return State.STOPPED_BEFORE_RUN
        return State.RUNNING if driver and driver.status != JobStatus.PENDING else State.STARTING


REQUESTED_ENDS = ("Stopped by time limit", "Stopped by stop file")
"""First words of the trainer's message when a time limit or a stop file ended the run."""


def end_of_attempt(rayjob: Object, driver: DriverState | None, stop: str) -> tuple[int, str]:
    """The exit code and message of an ended attempt, by its driver or, where Ray says nothing about it, its RayJob.

    A driver without an exit code was lost with its node: 75.
    """
    status = rayjob.get("status") or {}
    said = driver.message if driver else str(status.get("message") or status.get("reason") or "no message")
    line = find_error_line(said)
    if (driver.status if driver else status.get("jobStatus")) == JobStatus.SUCCEEDED:
        return 0, "done"
    if driver is None:
        if status.get("jobDeploymentStatus") == "ValidationFailed":
            return DeviceError.exit_code, f"the operator refused the RayJob: {said}"
        found = re.search(r"failed with exit code (\d+)", said)
        return (int(found[1]) if found else EXIT_AGAIN), line
    if driver.status == JobStatus.STOPPED:
        return EXIT_AGAIN, f"stopped by {stop or 'a request to Ray'}; the same command continues"
    exit_code = resolve_exit_code(driver.exit_code or None)
    return exit_code, line if exit_code == driver.exit_code else f"the driver was lost: {line}"


def may_try_again(record: Record) -> bool:
    """Whether another attempt follows the last. Retries count attempts since the newest one that left a checkpoint."""
    attempts = record.attempts
    count = next((n for n, each in enumerate(reversed(attempts), start=1) if each.progressed), len(attempts))
    return is_tried_again(attempts[-1].exit_code) and count <= record.deployment.retries and not record.stop


def has_progressed(before: dict[str, int], after: dict[str, int], message: str) -> bool:
    """Whether a disturbed attempt left a newer checkpoint; a time limit or a stop file is no disturbance."""
    is_newer = any(step > before.get(run, -1) for run, step in after.items())
    return is_newer and not message.startswith(REQUESTED_ENDS)
