"""The decision of the controller: from an observation to the one action of a pass. Nothing here reads or writes the
cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from deploy.exit_codes import EXIT_AGAIN
from k8s.controller.observation import Gang, Observation, State, end_of_attempt
from k8s.objects.deployment import Deployment
from k8s.objects.record import Outcome, Record
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX

WHOLE_GANG_SECONDS = 300.0
"""Seconds spent waiting for all nodes after a loss, where the recipe allows fewer."""
PENDING_SECONDS = 300.0
"""Seconds that a driver may lack its resource: KubeRay and Ray would leave it PENDING for ever."""
SUBMIT_SECONDS = 300.0
"""Seconds that the operator may take to submit a job, also again to a new head."""
HEAD_LOST_SECONDS = 600.0
"""Seconds that the Ray head may not answer during an attempt."""
SETTLE_SECONDS = 60.0
"""Seconds that the operator may take to mark a RayJob as ended after Ray has said so."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """The one thing that the controller does in a pass."""

    report: str = ""
    """A line for people, printed when it changes."""


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
    """Give the PodGroup fewer nodes. The next pass scales the worker group."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class StartAttempt(Action):
    """Create the RayJob of the next attempt."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class StopDriver(Action):
    """Let Ray send SIGTERM to the driver. Ray sends it once, however often it is asked."""


@dataclass(frozen=True, kw_only=True)
class EndAttempt(Action):
    """Write the attempt to the record."""

    exit_code: int
    message: str
    is_rayjob_kept: bool = False
    """Whether the RayJob, which has ended, stays for `kubectl get rayjobs`. The operator stops the job of another."""


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


def decide(observation: Observation) -> Action:
    """Choose the one action of this pass, by the state of the deployment:

        CLEARING            older RayJobs are deleted
            |
            v
        PLACING <---------------------------+   nodes, pods and Ray nodes come; a gang that lacks nodes is shrunk
            | all pods have joined Ray      |   where the recipe allows it after a loss
            v                               |
        SUBMITTING <------ HEAD_LOST        |   HEAD_LOST follows from any state with a RayJob when Ray does not
            |                  ^            |   answer; the operator submits the job to the new head
            v                  |            |
        PENDING ---------------+            |
            |                  |            |
            v                  |            |
        RUNNING ---------------+            |
            |                               |
            v                               |
        ATTEMPT_ENDED                       |   the attempt is written to the record
            |        | may be repeated      |
            |        +----------------------+
            v
        NO_ATTEMPT_LEFT     the outcome is written
            |
            v
        TAKING_DOWN         RayJobs, pods, PodGroup and nodes go

    A request to stop, or a limit that has passed, leads from PENDING and RUNNING to STOPPING and ATTEMPT_ENDED, from
    SUBMITTING to STOPPED_BEFORE_RUN, and from CLEARING and PLACING to NO_ATTEMPT_LEFT. Every wait has a limit: the
    attempt, or from CLEARING and PLACING the deployment, then ends with exit code 75.

    Raises `ValueError` for the state PLACING without an observed gang.
    """
    record = observation.record
    match observation.state:
        case State.CLEARING:
            return _clear(observation)
        case State.PLACING:
            if observation.gang is None:
                raise ValueError("an attempt cannot be placed without an observation of its gang")
            return _place(observation, observation.gang)
        case State.SUBMITTING:
            return _await_submission(observation)
        case State.PENDING:
            return _await_resource(observation)
        case State.RUNNING:
            return Wait(report=f"attempt {observation.attempt} is running")
        case State.STOPPING:
            return StopDriver(report=f"stopping for {record.stop}: the driver has its notice")
        case State.STOPPED_BEFORE_RUN:
            return EndAttempt(exit_code=EXIT_AGAIN, message=f"stopped by {record.stop} before its driver ran")
        case State.HEAD_LOST:
            return _await_head(observation)
        case State.ATTEMPT_ENDED:
            exit_code, message = end_of_attempt(observation.rayjob or {}, observation.driver, record.stop)
            return EndAttempt(exit_code=exit_code, message=message, is_rayjob_kept=True)
        case State.NO_ATTEMPT_LEFT:
            last = record.attempts[-1] if record.attempts else None
            stopped = f"stopped by {record.stop}; the same command continues"
            return _end(record, last.exit_code, last.message) if last else _end(record, EXIT_AGAIN, stopped)
        case State.TAKING_DOWN:
            return _take_down(observation)
        case state:
            assert_never(state)


def choose_size(deployment: Deployment, nodes: int, attempts: int, room: int, waited_seconds: float) -> int:
    """The number of nodes for a gang that still lacks some of `nodes`; 0 when the wait is over.

    After a loss it is the largest number that the recipe allows and for which `room` may suffice: Volcano decides.
    """
    patience = deployment.patience_seconds(attempts)
    if attempts and waited_seconds > min(WHOLE_GANG_SECONDS, patience):
        fewer = next((each for each in deployment.fewer_nodes if each < nodes and each <= room), None)
        if fewer is not None:
            return fewer
    return 0 if waited_seconds > patience else nodes


def _take_down(observation: Observation) -> Action:
    record, deployment = observation.record, observation.deployment
    is_patient = observation.waited_seconds < SETTLE_SECONDS
    names = [deployment.rayjob_name(number) for number, _ in enumerate(record.attempts, start=1)]
    return TakeDown(
        ended_rayjobs=frozenset(names if is_patient else ()),
        # Pods that were never placed are of no use, and would take nodes as soon as there are some.
        are_pods_kept=deployment.keep and bool(record.attempts),
    )


def _end(record: Record, exit_code: int, message: str) -> Action:
    tried = f" after {len(record.attempts)} attempts" if len(record.attempts) > 1 else ""
    return EndDeployment(outcome=Outcome(exit_code, message + tried))


def _clear(observation: Observation) -> Action:
    """Delete the RayJobs of an attempt or a deployment that was cut short."""
    waited = observation.waited_seconds
    limit = observation.deployment.start_timeout_seconds
    if waited > limit:
        message = f"the RayJob of an earlier attempt was not removed within {limit} s"
        return _end(observation.record, EXIT_AGAIN, message)
    report = "waiting for the KubeRay operator to end and remove the RayJob of an earlier attempt"
    return DeleteOlderRayJobs(report=report)


def _place(observation: Observation, gang: Gang) -> Action:
    """Place the gang and, once all of its pods have joined Ray, start the attempt.

    A gang that lacks nodes for too long is shrunk where the recipe allows it after a loss, or given up.
    """
    record, deployment, nodes = observation.record, observation.deployment, gang.nodes
    if gang.pool.refusal:
        return _end(record, gang.pool.exit_code, gang.pool.refusal)
    # Otherwise pods of one group would run different images, or KubeRay would choose which of too many pods go.
    must_empty = (not gang.is_up_to_date or gang.replicas > nodes) and bool(gang.replicas or gang.pods)
    missing = _explain_gang(deployment, gang, must_empty)
    if not missing:
        name = deployment.rayjob_name(observation.attempt)
        report = f"attempt {observation.attempt}: RayJob {name} runs {deployment.image} on {nodes} nodes"
        return StartAttempt(nodes=nodes, report=report)
    waited = observation.waited_seconds
    attempts = len(record.attempts)
    size = choose_size(deployment, nodes, attempts, gang.room, waited)
    if size == 0:
        return _end(record, EXIT_AGAIN, f"not up after {deployment.patience_seconds(attempts)} s: {missing}")
    if size < nodes:
        report = f"{nodes} nodes did not come in {waited:.0f} s, room for {gang.room}: this attempt runs on {size}"
        return ShrinkGang(nodes=size, report=report)
    if not gang.pool.is_raised:
        return HoldNodes(report=missing)
    if must_empty:
        return EmptyGroup(report=missing)
    if deployment.mode != "shared":  # its RayJob creates its pods
        return Wait(report=missing)
    return PlaceGang(nodes=nodes, report=missing)


def _explain_gang(deployment: Deployment, gang: Gang, must_empty: bool) -> str:
    """Explain what the gang still lacks; empty when the attempt can start."""
    if not gang.pool.is_raised:
        return gang.pool.report
    if must_empty:
        missing = f"waiting for earlier {deployment.stage} pods to leave"
    elif deployment.mode != "shared":
        # The RayJob would wait for nodes as well, but each attempt from 0 seconds: none begins before they are ready.
        return gang.pool.report
    elif not gang.is_up_to_date or gang.replicas != gang.nodes:
        missing = f"{deployment.stage}: {gang.replicas} -> {gang.nodes} pods of {deployment.image}"
    else:
        missing = gang.missing
    return f"{missing}; {gang.pool.report}" if missing and gang.pool.report else missing


def _await_resource(observation: Observation) -> Action:
    missing = observation.missing or "all pods are ready"
    if observation.waited_seconds <= PENDING_SECONDS:
        return Wait(report=f"the job is pending; {missing}")
    resource = f"{STAGE_RESOURCE_PREFIX}{observation.deployment.stage}"
    message = f"the job was pending for {PENDING_SECONDS:.0f} s: no live Ray node has {resource} to give; {missing}"
    return EndAttempt(exit_code=EXIT_AGAIN, message=message)


def _await_head(observation: Observation) -> Action:
    if observation.waited_seconds > HEAD_LOST_SECONDS:
        return EndAttempt(exit_code=EXIT_AGAIN, message=f"the Ray head was lost: {observation.ray_error}")
    report = "the Ray head does not answer; the operator will submit this attempt to a new head"
    return Wait(report=report)


def _await_submission(observation: Observation) -> Action:
    """Wait until Ray knows the job, on an isolated attempt also for the Ray cluster that its RayJob makes."""
    deployment, limit = observation.deployment, SUBMIT_SECONDS
    if deployment.mode == "isolated":
        limit = deployment.patience_seconds(len(observation.record.attempts))
    if observation.waited_seconds <= limit:
        return Wait(report=observation.missing or "waiting for the operator to submit the job")
    status = (observation.rayjob or {}).get("status") or {}
    said = observation.missing or f"its RayJob says {status.get('jobDeploymentStatus') or 'nothing'}"
    message = (
        f"the operator did not submit the job within {limit:.0f} s; {said}. Does the operator run, without a batch "
        f"scheduler of its own (k8s/README.md)?"
    )
    return EndAttempt(exit_code=EXIT_AGAIN, message=message)
