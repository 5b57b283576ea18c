"""The decision of the controller: from an observation to the one action of a pass. Nothing here reads or writes the
cluster.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import assert_never

from ray.job_submission import JobStatus

from deploy.exit_codes import EXIT_AGAIN
from k8s.controller.observation import Gang, Observation, State, end_of_attempt
from k8s.objects.attempt import has_been_submitted
from k8s.objects.deployment import Deployment
from k8s.objects.record import Outcome
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX

WHOLE_GANG_SECONDS = 300.0
"""Seconds spent waiting for all nodes after a loss, where the recipe allows fewer."""
DRIVER_SECONDS = 600.0
"""Seconds in which the driver of an attempt must run, also again on a new head. KubeRay and Ray would wait for ever."""


class Step(enum.Enum):
    """What the controller does in a pass."""

    WAIT = enum.auto()
    """Change nothing; the next pass observes again."""
    STOP_OLDER_RAYJOBS = enum.auto()
    """Stop the RayJobs of earlier attempts and deployments, so that no two of them write one run."""
    HOLD_NODES = enum.auto()
    """Ask the node pool for all nodes of the deployment, even if the attempt has fewer."""
    EMPTY_GROUP = enum.auto()
    """Scale the worker group to 0, because its pods cannot serve the attempt."""
    PLACE_GANG = enum.auto()
    """Give the PodGroup the action's number of nodes, and the worker group as many replicas."""
    SHRINK_GANG = enum.auto()
    """Give the PodGroup fewer nodes. The next pass scales the worker group."""
    START_ATTEMPT = enum.auto()
    """Create the RayJob of the next attempt."""
    STOP_DRIVER = enum.auto()
    """Let Ray send SIGTERM to the driver. Ray sends it once, however often it is asked."""
    END_ATTEMPT = enum.auto()
    """Write the action's outcome to the record as that of the attempt, and delete a RayJob that has not ended."""
    END_DEPLOYMENT = enum.auto()
    """Write the action's outcome to the record as that of the deployment."""
    TAKE_DOWN = enum.auto()
    """Stop the RayJobs, then remove pods and PodGroup, then give back the nodes."""
    STOP_RAYJOBS = enum.auto()
    """Stop the RayJobs, and leave the rest as it is (KEEP=1)."""


@dataclass(frozen=True)
class Action:
    """A step, and what it needs."""

    step: Step
    report: str = ""
    """A line for people, printed when it changes."""
    nodes: int = 0
    outcome: Outcome | None = None


def decide(seen: Observation) -> Action:
    """Choose the one action of this pass, by the state of the deployment:

        CLEARING            older RayJobs are stopped
            |
            v
        PLACING <-------------------+   nodes, pods and Ray nodes come; a gang that lacks nodes is shrunk where the
            | all pods have joined  |   recipe allows it after a loss
            v                       |
        STARTING <---+              |   the operator submits the job, and Ray finds a resource for its driver; again
            |        | head lost    |   after the Ray head was lost
            v        |              |
        RUNNING -----+              |
            |                       |
            v                       |
        ATTEMPT_ENDED               |   the attempt is written to the record
            |        | may be       |
            |        | repeated     |
            |        +--------------+
            v
        NO_ATTEMPT_LEFT             the outcome is written
            |
            v
        TAKING_DOWN                 RayJobs, pods, PodGroup and nodes go

    A request to stop, or a limit that has passed, leads from a driver that Ray knows to STOPPING and ATTEMPT_ENDED,
    from one that it has never known to STOPPED_BEFORE_RUN, and from CLEARING and PLACING to NO_ATTEMPT_LEFT. Every wait
    has a limit: the attempt, or from CLEARING and PLACING the deployment, then ends with exit code 75.

    Raises `ValueError` for the state PLACING without an observed gang.
    """
    record = seen.record
    match seen.state:
        case State.CLEARING:
            return _clear(seen)
        case State.PLACING:
            if seen.gang is None:
                raise ValueError("an attempt cannot be placed without an observation of its gang")
            return _place(seen, seen.gang)
        case State.STARTING:
            return _await_driver(seen)
        case State.RUNNING:
            return Action(Step.WAIT, f"attempt {seen.attempt} is running")
        case State.STOPPING:
            return Action(Step.STOP_DRIVER, f"stopping for {record.stop}: the driver has its grace period")
        case State.STOPPED_BEFORE_RUN:
            return _end_attempt(EXIT_AGAIN, f"stopped by {record.stop} before its driver ran")
        case State.ATTEMPT_ENDED:
            return _end_attempt(*end_of_attempt(seen.rayjob or {}, seen.driver, record.stop))
        case State.NO_ATTEMPT_LEFT:
            stopped = Outcome(EXIT_AGAIN, f"stopped by {record.stop}; the same command continues")
            last = record.attempts[-1] if record.attempts else stopped
            return _end(seen, last.exit_code, last.message)
        case State.TAKING_DOWN:
            # Pods that were never placed are of no use, and would take nodes as soon as there are some. Those that an
            # earlier deployment left up are not touched by one that its image does not accept.
            is_kept = (seen.deployment.keep and record.attempts) or record.acceptance is None
            return Action(Step.STOP_RAYJOBS if is_kept else Step.TAKE_DOWN)
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


def _end_attempt(exit_code: int, message: str) -> Action:
    return Action(Step.END_ATTEMPT, outcome=Outcome(exit_code, message))


def _end(seen: Observation, exit_code: int, message: str) -> Action:
    attempts = len(seen.record.attempts)
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    return Action(Step.END_DEPLOYMENT, outcome=Outcome(exit_code, message + tried))


def _clear(seen: Observation) -> Action:
    """Delete the RayJobs of an attempt or a deployment that was cut short."""
    limit = seen.deployment.start_timeout_seconds
    if seen.waited_seconds > limit:
        return _end(seen, EXIT_AGAIN, f"the RayJob of an earlier attempt was not removed within {limit} s")
    report = "waiting for the KubeRay operator to end and remove the RayJob of an earlier attempt"
    return Action(Step.STOP_OLDER_RAYJOBS, report)


def _place(seen: Observation, gang: Gang) -> Action:
    """Place the gang and, once all of its pods have joined Ray, start the attempt.

    A gang that lacks nodes for too long is shrunk where the recipe allows it after a loss, or given up.
    """
    deployment, nodes = seen.deployment, gang.nodes
    if gang.pool.refusal:
        return _end(seen, gang.pool.exit_code, gang.pool.refusal)
    step, missing = _next_step(deployment, gang)
    if step is Step.START_ATTEMPT:
        name = deployment.rayjob_name(seen.attempt)
        report = f"attempt {seen.attempt}: RayJob {name} runs {deployment.image} on {nodes} nodes"
        return Action(step, report, nodes)
    waited, attempts = seen.waited_seconds, len(seen.record.attempts)
    size = choose_size(deployment, nodes, attempts, gang.room, waited)
    if size == 0:
        return _end(seen, EXIT_AGAIN, f"not up after {deployment.patience_seconds(attempts)} s: {missing}")
    if size < nodes:
        report = f"{nodes} nodes did not come in {waited:.0f} s, room for {gang.room}: this attempt runs on {size}"
        return Action(Step.SHRINK_GANG, report, size)
    return Action(step, missing, nodes if step is Step.PLACE_GANG else 0)


def _next_step(deployment: Deployment, gang: Gang) -> tuple[Step, str]:
    """The next step towards the attempt, and what the gang lacks."""
    if not gang.pool.is_raised:
        return Step.HOLD_NODES, gang.pool.report
    of_pool = f"; {gang.pool.report}" if gang.pool.report else ""
    # Otherwise pods of one group would run different images, or KubeRay would choose which of too many pods go.
    if (not gang.is_up_to_date or gang.replicas > gang.nodes) and (gang.replicas or gang.pods):
        return Step.EMPTY_GROUP, f"waiting for earlier {deployment.stage} pods to leave{of_pool}"
    if deployment.mode != "shared":
        # Its RayJob creates its pods, and would wait for nodes as well, but each attempt from 0 seconds.
        return (Step.WAIT if gang.pool.report else Step.START_ATTEMPT), gang.pool.report
    if not gang.is_up_to_date or gang.replicas != gang.nodes:
        change = f"{gang.replicas} -> {gang.nodes} pods of {deployment.image}"
        return Step.PLACE_GANG, f"{deployment.stage}: {change}{of_pool}"
    return (Step.PLACE_GANG, gang.missing + of_pool) if gang.missing else (Step.START_ATTEMPT, "")


def _await_driver(seen: Observation) -> Action:
    """Wait until the driver runs, on an isolated attempt also for the Ray cluster that its RayJob makes."""
    deployment, limit = seen.deployment, DRIVER_SECONDS
    if deployment.mode == "isolated" and not has_been_submitted(seen.rayjob or {}):
        limit = deployment.patience_seconds(len(seen.record.attempts))
    said, error = _explain_driver(seen)
    if seen.waited_seconds <= limit:
        return Action(Step.WAIT, said)
    return _end_attempt(EXIT_AGAIN, f"its driver did not run within {limit:.0f} s: {said}{error}")


def _explain_driver(seen: Observation) -> tuple[str, str]:
    """Explain why the driver of the attempt does not run yet, and the words of an error that change at each try."""
    pods = seen.missing or "all pods are ready"
    if seen.driver and seen.driver.status == JobStatus.PENDING:
        resource = f"{STAGE_RESOURCE_PREFIX}{seen.deployment.stage}"
        return f"the job is pending, because no live Ray node has {resource} to give; {pods}", ""
    if seen.ray_error and has_been_submitted(seen.rayjob or {}):
        error = f": {seen.ray_error}"
        return "the Ray head does not answer; the operator will submit this attempt to a new head", error
    status = ((seen.rayjob or {}).get("status") or {}).get("jobDeploymentStatus") or "nothing"
    return (
        f"waiting for the operator to submit the job; {pods}, and its RayJob says {status}",
        ". Does the operator run, without a batch scheduler of its own (k8s/README.md)?",
    )
