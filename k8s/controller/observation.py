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
from deploy.stage_contract import ClusterMode
from k8s.controller.node_pool import PoolState
from k8s.controller.ray_jobs import DriverState
from k8s.objects.api import Object
from k8s.objects.attempt import has_ended, has_run
from k8s.objects.deployment import Deployment
from k8s.objects.record import Outcome, Record
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError


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
    """A sentence about the pods that are not ready; empty when all are."""
    joined: int = 0
    """Number of the stage's pods that have joined Ray."""
    ray_error: str = ""
    """The error of a Ray head that could not count them."""
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
    older_rayjobs: int = 0
    """Number of RayJobs that keep the next attempt from starting."""
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
    """Seconds since the deployment entered this state or, while a gang is placed, since the gang has this size."""
    age_seconds: float = 0.0
    """Seconds since the deploy Job was created, however often its pod was replaced."""

    @property
    def deployment(self) -> Deployment:
        return self.record.deployment

    @property
    def attempt(self) -> int:
        """The number of the attempt that is under way or comes next, from 1."""
        return len(self.record.attempts) + 1

    @property
    def is_past_limit(self) -> bool:
        """Whether the deployment's limit has passed, and nothing has ended it or asked it to stop yet."""
        record, limit = self.record, self.deployment.limit_seconds
        return 0 < limit < self.age_seconds and not (record.stop or record.outcome)

    @property
    def state(self) -> State:
        """The state of the deployment, from the record first, then from the attempt's RayJob and Ray."""
        record = self.record
        if record.outcome:
            return State.TAKING_DOWN
        if self.rayjob is not None:
            return state_of_attempt(self.rayjob, self.driver, not self.ray_error, record.stop, record.deployment.mode)
        if record.stop or (record.attempts and not may_try_again(record)):
            return State.NO_ATTEMPT_LEFT
        return State.CLEARING if self.older_rayjobs else State.PLACING


class State(enum.Enum):
    """The state of a deployment, which follows from its record, its RayJob and Ray."""

    CLEARING = enum.auto()
    """A RayJob of an earlier attempt or deployment may still run, and keeps the next attempt from starting."""
    PLACING = enum.auto()
    """The gang of the next attempt is being placed: its nodes, its pods and their Ray nodes."""
    SUBMITTING = enum.auto()
    """The attempt has a RayJob, and Ray does not know its job: the operator has not submitted it to this head yet."""
    PENDING = enum.auto()
    """Ray knows the job and has no resource for its driver."""
    RUNNING = enum.auto()
    """The driver runs."""
    STOPPING = enum.auto()
    """The driver exists, and somebody asked the deployment to stop."""
    STOPPED_BEFORE_RUN = enum.auto()
    """Somebody asked the deployment to stop before Ray knew the attempt's job."""
    HEAD_LOST = enum.auto()
    """The Ray head does not answer while the attempt has a RayJob."""
    DRIVER_ENDED = enum.auto()
    """Ray says that the driver has ended."""
    RAYJOB_ENDED = enum.auto()
    """The operator says that the RayJob has ended, and Ray says nothing about the driver."""
    NO_ATTEMPT_LEFT = enum.auto()
    """No attempt follows: the last one is not repeated, or somebody asked the deployment to stop before the first."""
    TAKING_DOWN = enum.auto()
    """The outcome is written; RayJobs, pods, PodGroup and nodes go."""


def state_of_attempt(
    rayjob: Object, driver: DriverState | None, is_ray_reachable: bool, stop: str, mode: ClusterMode
) -> State:
    """The state of a deployment whose attempt has a RayJob. Ray's word on the driver counts before the RayJob's status.

    `driver` is None where Ray does not know the job or does not answer; `stop` names the person who asked to stop.
    """
    if driver:
        if driver.status.is_terminal():
            return State.DRIVER_ENDED
        if stop:
            return State.STOPPING
        return State.PENDING if driver.status == JobStatus.PENDING else State.RUNNING
    if has_ended(rayjob):
        return State.RAYJOB_ENDED
    if stop and not has_run(rayjob):
        return State.STOPPED_BEFORE_RUN
    is_starting = mode == "isolated" and not has_run(rayjob)  # its own Ray cluster
    return State.SUBMITTING if is_ray_reachable or is_starting else State.HEAD_LOST


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
