"""The decision of the reconciler: from what it observes to the one thing that it does next. Nothing here reads the
cluster or writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deploy.exit_codes import EXIT_AGAIN
from k8s.controller.node_pool import PoolState
from k8s.controller.outcome import exit_code_of_driver, exit_code_of_rayjob, may_try_again
from k8s.controller.phase import Phase, phase_of
from k8s.controller.ray_jobs import DriverState
from k8s.objects.deployment import Deployment
from k8s.objects.placement import ask_for_operator
from k8s.objects.record import Outcome, Record
from k8s.objects.worker_group import WorkerGroup
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX

WHOLE_GANG_SECONDS = 300.0  # for which all nodes are waited for where fewer would do
PENDING_SECONDS = 300.0  # KubeRay and Ray leave a job that finds no resource PENDING for ever
SUBMIT_SECONDS = 300.0  # also what the operator may take to submit again after a lost head
HEAD_LOST_SECONDS = 600.0
SETTLE_SECONDS = 60.0  # in which the operator sees, too, that a driver has ended


@dataclass(frozen=True)
class Gang:
    """The pods for the next attempt, as they are now."""

    nodes: int
    """That the attempt is placed on: fewer than the deployment's after a loss."""
    replicas: int
    """Of the worker group."""
    pods: int
    """Of the stage, those on their way out too."""
    is_up_to_date: bool
    """Does the worker group of the shared cluster make pods as the deployment wants them?"""
    missing: str = ""
    """Why not all pods are ready."""
    joined: int = 0
    """Ray nodes of the stage."""
    ray_error: str = ""
    """Why Ray could not tell them."""
    room: int = 0
    """Pods that the nodes which are up could hold."""
    pool: PoolState = field(default_factory=PoolState)
    """Where its nodes come from."""
    group: WorkerGroup | None = field(default=None, compare=False, repr=False)
    """The worker group as it was read. No decision looks at it: what is written is written about this state of it."""


@dataclass(frozen=True)
class Observation:
    """What the reconciler sees of its deployment in one pass. What a pass does not need is not looked at."""

    record: Record
    older_rayjobs: int = 0
    """RayJobs of the stage while the attempt has none."""
    gang: Gang | None = None
    """While the attempt has no RayJob."""
    rayjob: dict[str, Any] | None = None
    """The attempt's."""
    driver: DriverState | None = None
    """What Ray says of the attempt; None when it does not know it, or does not answer."""
    ray_error: str = ""
    """Why Ray does not answer; empty when it does."""
    missing: str = ""
    """Why not all pods are ready, of an attempt that waits for them."""
    cluster_event: str = ""
    """The newest warning about an isolated attempt's own cluster."""
    waiting_for: str = ""
    """What the passes before this one waited for."""
    waited_seconds: float = 0.0
    """For which they waited for that, and for nothing else."""

    @property
    def deployment(self) -> Deployment:
        return self.record.deployment

    @property
    def attempt(self) -> int:
        """The number of the attempt that is under way, or comes next."""
        return len(self.record.attempts) + 1

    @property
    def phase(self) -> Phase:
        """Of an attempt that has a RayJob."""
        return phase_of(
            self.rayjob or {}, self.driver, not self.ray_error, self.record.stop, self.record.deployment.mode
        )

    @property
    def is_start_due(self) -> bool:
        """Is the next attempt to be started?"""
        record = self.record
        is_over = bool(record.outcome or record.stop) or bool(record.attempts and not may_try_again(record))
        return self.rayjob is None and not is_over

    def waited_for(self, what: str) -> float:
        """Seconds."""
        return self.waited_seconds if self.waiting_for == what else 0.0


@dataclass(frozen=True, kw_only=True)
class Action:
    """What is done in one pass."""

    report: str = ""
    """What people are told."""
    waits_for: str | None = None
    """What the next pass is waiting for. None leaves that as it is; empty text ends it."""


@dataclass(frozen=True, kw_only=True)
class Wait(Action):
    """Nothing is done; the next pass looks again."""


@dataclass(frozen=True, kw_only=True)
class DeleteOlderRayJobs(Action):
    """Two RayJobs would write one run."""


@dataclass(frozen=True, kw_only=True)
class EmptyGroup(Action):
    """The worker group goes to 0 before its pods are made anew."""


@dataclass(frozen=True, kw_only=True)
class HoldNodes(Action):
    """The pool is asked for all nodes of the deployment, also for an attempt on fewer."""


@dataclass(frozen=True, kw_only=True)
class PlaceGang(Action):
    """The PodGroup is made or changed to so many nodes, and the worker group is scaled to them."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class ShrinkGang(Action):
    """The PodGroup is changed to fewer nodes; the next pass scales the worker group."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class StartAttempt(Action):
    """The RayJob is created."""

    nodes: int


@dataclass(frozen=True, kw_only=True)
class StopDriver(Action):
    """Ray sends the driver SIGTERM, once."""


@dataclass(frozen=True, kw_only=True)
class EndAttempt(Action):
    """The attempt is written to the record."""

    exit_code: int
    message: str
    is_driver_stopped: bool = False
    """Ray stops the driver, which has not begun."""
    is_rayjob_kept: bool = False
    """The RayJob has ended, and stays for `kubectl get rayjobs`."""


@dataclass(frozen=True, kw_only=True)
class EndDeployment(Action):
    """The outcome is written to the record."""

    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class TakeDown(Action):
    """RayJobs are stopped; then pods and gang go, and then their nodes, unless they are kept."""

    ended_rayjobs: frozenset[str]
    """Ray says that they have ended; the operator has still to see it."""
    are_pods_kept: bool


def decide(observation: Observation) -> Action:
    """The one thing to do next."""
    record = observation.record
    if record.outcome:
        return _take_down(observation)
    if record.attempts and not may_try_again(record):
        last = record.attempts[-1]
        return _end(record, last.exit_code, last.message)
    if observation.rayjob is not None:
        return _follow(observation)
    if record.stop:
        return _end(record, EXIT_AGAIN, f"stopped by {record.stop}; the same command continues")
    if observation.older_rayjobs:
        return _clear(observation)
    if observation.gang is None:
        raise ValueError("an attempt cannot be placed without a look at its gang")
    return _place(observation, observation.gang)


def choose_size(deployment: Deployment, nodes: int, attempts: int, room: int, waited_seconds: float) -> int:
    """The number of nodes to place a gang on that still lacks some of `nodes`; 0 to give up.

    After a loss it is the largest that the recipe allows and for which there may be room; Volcano has the last word.
    """
    patience = deployment.patience_seconds(attempts)
    if attempts and waited_seconds > min(WHOLE_GANG_SECONDS, patience):
        fewer = next((each for each in deployment.fewer_nodes if each < nodes and each <= room), None)
        if fewer is not None:
            return fewer
    return 0 if waited_seconds > patience else nodes


def _take_down(observation: Observation) -> Action:
    record, deployment = observation.record, observation.deployment
    settling = "the operator to see the end"
    is_patient = observation.waited_for(settling) < SETTLE_SECONDS
    names = [deployment.rayjob_name(number) for number, _ in enumerate(record.attempts, start=1)]
    return TakeDown(
        ended_rayjobs=frozenset(names if is_patient else ()),
        # Pods that never stood are no use to anybody, and would take nodes as soon as there are some.
        are_pods_kept=deployment.keep and bool(record.attempts),
        waits_for=settling,
    )


def _end(record: Record, exit_code: int, message: str) -> Action:
    tried = f" after {len(record.attempts)} attempts" if len(record.attempts) > 1 else ""
    return EndDeployment(outcome=Outcome(exit_code, message + tried))


def _clear(observation: Observation) -> Action:
    """Any RayJob that is there is older, of an attempt or a deployment that was cut short."""
    what = "a RayJob to go"
    if observation.waited_for(what) > observation.deployment.start_timeout_seconds:
        return _end(observation.record, EXIT_AGAIN, "an earlier attempt's RayJob does not go")
    asks = ask_for_operator(observation.waited_for(what))
    report = f"waiting for the KubeRay operator to end and remove an earlier attempt's RayJob{asks}"
    return DeleteOlderRayJobs(report=report, waits_for=what)


def _place(observation: Observation, gang: Gang) -> Action:
    """Bring the gang closer to its nodes; start the attempt once it stands. A gang that cannot be had is shrunk where
    the recipe allows that after a loss, or given up.
    """
    record, deployment, nodes = observation.record, observation.deployment, gang.nodes
    if gang.pool.refusal:
        return _end(record, gang.pool.exit_code, gang.pool.refusal)
    # Only at 0: else pods of one group run different images, and KubeRay chooses which pods of too many go.
    must_empty = (not gang.is_up_to_date or gang.replicas > nodes) and bool(gang.replicas or gang.pods)
    missing = _explain_gang(deployment, gang, must_empty)
    if not missing:
        name = deployment.rayjob_name(observation.attempt)
        report = f"attempt {observation.attempt}: RayJob {name} runs {deployment.image} on {nodes} nodes"
        return StartAttempt(nodes=nodes, report=report)
    what = f"a gang of {nodes}"
    waited = observation.waited_for(what)
    attempts = len(record.attempts)
    size = choose_size(deployment, nodes, attempts, gang.room, waited)
    if size == 0:
        return _end(record, EXIT_AGAIN, f"not up after {deployment.patience_seconds(attempts)} s: {missing}")
    if size < nodes:
        report = f"no {nodes} nodes after {waited:.0f} s, room for {gang.room}: this attempt goes on with {size}"
        return ShrinkGang(nodes=size, report=report, waits_for=what)
    if gang.is_up_to_date and gang.replicas == nodes and gang.pods < nodes and (asks := ask_for_operator(waited)):
        missing = f"{missing}; waited{asks}"
    if not gang.pool.is_raised:
        return HoldNodes(report=missing, waits_for=what)
    if must_empty:
        return EmptyGroup(report=missing, waits_for=what)
    if deployment.mode != "shared":  # its own cluster's pods are placed with its RayJob
        return Wait(report=missing, waits_for=what)
    return PlaceGang(nodes=nodes, report=missing, waits_for=what)


def _explain_gang(deployment: Deployment, gang: Gang, must_empty: bool) -> str:
    """What the gang still lacks; empty when the attempt can start."""
    if not gang.pool.is_raised:
        return gang.pool.report
    missing = _explain_pods(deployment, gang, must_empty)
    if deployment.mode != "shared" and not missing:
        # Its cluster waits for nodes, too, but each attempt anew: better none begins before they are there.
        return gang.pool.report
    return f"{missing}; {gang.pool.report}" if missing and gang.pool.report else missing


def _explain_pods(deployment: Deployment, gang: Gang, must_empty: bool) -> str:
    stage, nodes = deployment.stage, gang.nodes
    if must_empty:
        return f"waiting for {stage} pods that were there before to leave"
    if deployment.mode != "shared":
        return ""
    if not gang.is_up_to_date or gang.replicas != nodes:
        return f"{stage}: {gang.replicas} -> {nodes} pods of {deployment.image}"
    if gang.missing:
        return gang.missing
    if gang.ray_error:
        return f"waiting for the Ray head: {gang.ray_error}"
    return f"{gang.joined} of {nodes} {stage} pods have joined Ray" if gang.joined < nodes else ""


def _follow(observation: Observation) -> Action:
    """Follow the attempt until Ray or the operator says how it ended. Ray's word comes first."""
    record, driver, phase = observation.record, observation.driver, observation.phase
    rayjob = observation.rayjob or {}
    if phase is Phase.DRIVER_ENDED and driver:
        exit_code, message = exit_code_of_driver(driver, record.stop)
        return _end_attempt(exit_code, message, is_rayjob_kept=True)
    if phase is Phase.RAYJOB_ENDED:
        exit_code, message = exit_code_of_rayjob(rayjob)
        return _end_attempt(exit_code, message, is_rayjob_kept=True)
    if phase is Phase.STOPPED_BEFORE_RUN:
        return _end_attempt(EXIT_AGAIN, f"stopped by {record.stop} before its driver ran")
    if phase is Phase.STOPPING:
        return StopDriver(report=f"stopping for {record.stop}: the driver has its notice")
    if phase is Phase.PENDING:
        return _await_resource(observation)
    if phase is Phase.RUNNING and driver:
        return Wait(report=f"attempt {observation.attempt} is {driver.status.lower()}", waits_for="")
    if phase is Phase.ISOLATED_START:
        return _await_own_cluster(observation)
    if phase is Phase.HEAD_LOST:
        return _await_head(observation)
    return _await_submission(observation)


def _end_attempt(
    exit_code: int, message: str, is_driver_stopped: bool = False, is_rayjob_kept: bool = False
) -> EndAttempt:
    return EndAttempt(
        exit_code=exit_code,
        message=message,
        is_driver_stopped=is_driver_stopped,
        is_rayjob_kept=is_rayjob_kept,
        waits_for="",
    )


def _await_resource(observation: Observation) -> Action:
    missing, what = observation.missing or "all pods are ready", "a resource"
    if observation.waited_for(what) <= PENDING_SECONDS:
        return Wait(report=f"the job is pending; {missing}", waits_for=what)
    resource = f"{STAGE_RESOURCE_PREFIX}{observation.deployment.stage}"
    message = f"the job was pending for {PENDING_SECONDS:.0f} s: no live Ray node has {resource} to give; {missing}"
    return _end_attempt(EXIT_AGAIN, message, is_driver_stopped=True)


def _await_own_cluster(observation: Observation) -> Action:
    """The head and the pods of an isolated attempt are being placed."""
    missing, event, what = observation.missing or "its Ray head is starting", observation.cluster_event, "its cluster"
    patience = observation.deployment.patience_seconds(len(observation.record.attempts))
    if observation.waited_for(what) > patience:
        return _end_attempt(EXIT_AGAIN, f"not up after {patience} s: {missing} {event}".strip())
    return Wait(report=f"{missing} {f'({event})' if event else ''}".strip(), waits_for=what)


def _await_head(observation: Observation) -> Action:
    what = "the head"
    if observation.waited_for(what) > HEAD_LOST_SECONDS:
        return _end_attempt(EXIT_AGAIN, f"the Ray head was lost: {observation.ray_error}")
    return Wait(report="the Ray head does not answer; a new one runs this attempt again by itself", waits_for=what)


def _await_submission(observation: Observation) -> Action:
    what = "submission"
    if observation.waited_for(what) <= SUBMIT_SECONDS:
        return Wait(report="waiting for the operator to submit the job", waits_for=what)
    status = (observation.rayjob or {}).get("status") or {}
    message = (
        f"the operator did not submit the job within {SUBMIT_SECONDS:.0f} s; its RayJob says "
        f"{status.get('jobDeploymentStatus') or 'nothing'}. Does the operator run, without a batch scheduler of its "
        f"own (k8s/README.md)?"
    )
    return _end_attempt(EXIT_AGAIN, message)
