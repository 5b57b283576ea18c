"""The phase of an attempt, which is one RayJob."""

from __future__ import annotations

import enum

from ray.job_submission import JobStatus

from k8s.controller.ray_jobs import DriverState
from k8s.objects.api import Object
from k8s.objects.deployment import ClusterMode
from k8s.objects.rayjob import has_ended, has_run


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


def phase_of(job: Object, driver: DriverState | None, is_ray_there: bool, stop: str, mode: ClusterMode) -> Phase:
    """From the RayJob, from what Ray says of it (None: nothing), and from the request that it stop."""
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
