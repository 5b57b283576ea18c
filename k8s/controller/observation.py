"""The observation of one pass: all that the controller's decision is based on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k8s.controller.deployment_state import Awaited, State, state_of_attempt
from k8s.controller.node_pool import PoolState
from k8s.controller.outcome import may_try_again
from k8s.controller.ray_jobs import DriverState
from k8s.objects.deployment import Deployment
from k8s.objects.record import Record
from k8s.objects.worker_group import WorkerGroup


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
    cluster_event: str = ""
    """The newest warning about the Ray cluster of an isolated attempt."""
    waiting_for: Awaited = Awaited.NOTHING
    """The thing that the earlier passes waited for."""
    waited_seconds: float = 0.0
    """Seconds spent waiting for `waiting_for`."""

    @property
    def deployment(self) -> Deployment:
        return self.record.deployment

    @property
    def attempt(self) -> int:
        """The number of the attempt that is under way or comes next, from 1."""
        return len(self.record.attempts) + 1

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

    def waited_for(self, awaited: Awaited) -> float:
        """Seconds spent waiting for this thing; 0 when the earlier passes waited for another."""
        return self.waited_seconds if self.waiting_for is awaited else 0.0
