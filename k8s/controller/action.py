"""The actions of the controller, of which `decision.decide` chooses one in each pass."""

from __future__ import annotations

from dataclasses import dataclass

from k8s.controller.deployment_state import Awaited
from k8s.objects.record import Outcome


@dataclass(frozen=True, kw_only=True)
class Action:
    """The one thing that the controller does in a pass."""

    report: str = ""
    """A line for people, printed when it changes."""
    waits_for: Awaited | None = None
    """The thing that the next pass waits for; None leaves the present wait as it is."""


@dataclass(frozen=True, kw_only=True)
class Wait(Action):
    """Change nothing; the next pass observes again."""


@dataclass(frozen=True, kw_only=True)
class DeleteOlderRayJobs(Action):
    """Delete the RayJobs of earlier attempts and deployments, so that no two of them write one run."""


@dataclass(frozen=True, kw_only=True)
class EmptyGroup(Action):
    """Scale the worker group to 0, because its pods cannot serve the attempt."""


@dataclass(frozen=True, kw_only=True)
class HoldNodes(Action):
    """Ask the node pool for all nodes of the deployment, even if the attempt has fewer."""


@dataclass(frozen=True, kw_only=True)
class PlaceGang(Action):
    """Give the PodGroup this many nodes, and the worker group as many replicas."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class ShrinkGang(Action):
    """Give the PodGroup fewer nodes. The next pass scales the worker group, and waits for the gang from 0 seconds."""

    nodes: int
    waits_for: Awaited | None = Awaited.NOTHING


@dataclass(frozen=True, kw_only=True)
class StartAttempt(Action):
    """Create the RayJob of the next attempt."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class StopDriver(Action):
    """Let Ray send SIGTERM to the driver, once."""


@dataclass(frozen=True, kw_only=True)
class EndAttempt(Action):
    """Write the attempt to the record."""

    exit_code: int
    message: str
    is_driver_stopped: bool = False
    """Whether Ray is asked to stop the driver, which has not begun."""
    is_rayjob_kept: bool = False
    """Whether the RayJob, which has ended, stays for `kubectl get rayjobs`."""
    waits_for: Awaited | None = Awaited.NOTHING


@dataclass(frozen=True, kw_only=True)
class EndDeployment(Action):
    """Write the outcome of the deployment to the record."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class TakeDown(Action):
    """Stop the RayJobs, then remove pods and PodGroup, then give back the nodes; all but the first unless kept."""

    ended_rayjobs: frozenset[str]
    """RayJobs that Ray says have ended, and that the operator is given time to mark as ended."""
    are_pods_kept: bool
