"""The states of a deployment, and what the controller waits for in them. `decision.decide` has the diagram."""

from __future__ import annotations

import enum

from ray.job_submission import JobStatus

from k8s.controller.ray_jobs import DriverState
from k8s.objects.api import Object
from k8s.objects.deployment import ClusterMode
from k8s.objects.rayjob import has_ended, has_run


class State(enum.Enum):
    """The state of a deployment, which follows from its record, its RayJob and Ray."""

    CLEARING = enum.auto()
    """A RayJob of an earlier attempt or deployment may still run, and keeps the next attempt from starting."""
    PLACING = enum.auto()
    """The gang of the next attempt is being placed: its nodes, its pods and their Ray nodes."""
    CLUSTER_STARTING = enum.auto()
    """The attempt has a RayJob, and the Ray cluster that this RayJob creates for itself is starting."""
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


class Awaited(enum.Enum):
    """The thing that the controller waits for. A wait for another thing begins at 0 seconds."""

    NOTHING = enum.auto()
    OLDER_RAYJOBS = enum.auto()
    """The RayJobs of an earlier attempt or deployment end and go."""
    GANG = enum.auto()
    """All pods of the next attempt are placed and have joined Ray."""
    OWN_CLUSTER = enum.auto()
    """The Ray cluster of an isolated attempt starts."""
    SUBMISSION = enum.auto()
    """The operator submits the job to Ray."""
    DRIVER_RESOURCE = enum.auto()
    """A Ray node of the stage offers the resource that the driver needs."""
    HEAD = enum.auto()
    """The Ray head answers again."""
    OPERATOR = enum.auto()
    """The operator writes into the RayJob that it has ended, which Ray has said already."""


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
    if mode == "isolated" and not has_run(rayjob):
        return State.CLUSTER_STARTING
    return State.SUBMITTING if is_ray_reachable else State.HEAD_LOST
