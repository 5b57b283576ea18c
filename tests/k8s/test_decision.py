"""The controller's decision as a table: an observation, the state that follows from it, and the action."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from ray.job_submission import JobStatus

from k8s.controller.action import (
    Action,
    DeleteOlderRayJobs,
    EmptyGroup,
    EndAttempt,
    EndDeployment,
    HoldNodes,
    PlaceGang,
    ShrinkGang,
    StartAttempt,
    StopDriver,
    TakeDown,
    Wait,
)
from k8s.controller.decision import (
    HEAD_LOST_SECONDS,
    PENDING_SECONDS,
    SETTLE_SECONDS,
    SUBMIT_SECONDS,
    WHOLE_GANG_SECONDS,
    decide,
)
from k8s.controller.node_pool import PoolState
from k8s.controller.observation import Gang, Observation
from k8s.controller.ray_jobs import DriverState
from k8s.controller.state import Awaited, State
from k8s.objects.placement import OPERATOR_SECONDS
from k8s.objects.record import Outcome, Record
from tests.k8s.builders import deployment_of

IMAGE = deployment_of().image
PATIENCE = 1_800.0
LOSS_PATIENCE = 20_000.0
LONG = WHOLE_GANG_SECONDS + 1
LOST = Outcome(75, "the driver was lost")
DONE = Outcome(0, "done")
RAYJOBS = frozenset({"trainer-abc123-1"})
UNRAISED = PoolState(is_raised=False, report="node group: 0 -> 8")


def seen(
    attempts: tuple[Outcome, ...] = (), outcome: Outcome | None = None, stop: str = "", **observed: Any
) -> Observation:
    """An observation of a deployment of 8 nodes that may continue on 4."""
    wanted: dict[str, Any] = {"nodes": 8, "fewer_nodes": (4,), "start_timeout_seconds": int(PATIENCE), "retries": 1}
    wanted |= {"loss_timeout_seconds": int(LOSS_PATIENCE)}
    wanted |= {name: observed.pop(name) for name in ("mode", "keep") if name in observed}
    record = Record(deployment_of(**wanted), "u", "1", attempts, {}, outcome, stop, False, False, "now")
    return Observation(record, **observed)


def gang(nodes: int = 8, **changes: Any) -> Gang:
    """A gang whose pods have all joined Ray, with changes."""
    standing: dict[str, Any] = {"replicas": nodes, "pods": nodes, "is_up_to_date": True, "joined": nodes}
    return Gang(nodes, **standing | changes)


def waited(awaited: Awaited, seconds: float) -> dict[str, Any]:
    return {"waiting_for": awaited, "waited_seconds": seconds}


def placed(**status: str) -> dict[str, Any]:
    return {"rayjob": {"status": status, "spec": {}}}


def driver(status: JobStatus, exit_code: int | None = None, message: str = "") -> dict[str, Any]:
    return placed(jobStatus="RUNNING") | {"driver": DriverState(status, exit_code, message, 1)}


class Case(NamedTuple):
    """An observation with the decision that follows from it."""

    observation: Observation
    state: State
    kind: type[Action]
    waits_for: Awaited | None
    values: dict[str, Any]
    """Attributes of the action, such as `nodes`; `exit_code` also of an outcome."""
    mentions: tuple[str, ...]
    """Names and values that the report or the message contains."""


def case(
    name: str,
    observation: Observation,
    state: State,
    kind: type[Action],
    *mentions: str,
    waits_for: Awaited | None = None,
    **values: Any,
) -> Any:
    return pytest.param(Case(observation, state, kind, waits_for, values, mentions), id=name)


OTHER_PODS = {"replicas": 2, "pods": 2, "is_up_to_date": False}
NO_PODS = {"replicas": 0, "pods": 0, "is_up_to_date": False, "joined": 0}
PLACING, GANG = State.PLACING, {"waits_for": Awaited.GANG}
WITHOUT_RAYJOB = [
    case("another deployment's pods", seen(gang=gang(**OTHER_PODS)), PLACING, EmptyGroup, "trainer", **GANG),
    case(
        "terminating pods",
        seen(gang=gang(replicas=0, pods=2, is_up_to_date=False)),
        PLACING,
        EmptyGroup,
        "trainer",
        **GANG,
    ),
    case("more pods than nodes", seen((LOST,), gang=gang(4, replicas=8)), PLACING, EmptyGroup, "trainer", **GANG),
    case("an empty group", seen(gang=gang(**NO_PODS)), PLACING, PlaceGang, "0 -> 8", IMAGE, nodes=8, **GANG),
    case("too few pods", seen(gang=gang(replicas=4, pods=4)), PLACING, PlaceGang, "4 -> 8", nodes=8, **GANG),
    case("pods that are not ready", seen(gang=gang(missing="7 of 8")), PLACING, PlaceGang, "7 of 8", nodes=8, **GANG),
    case(
        "a head that does not answer",
        seen(gang=gang(joined=0, ray_error="refused")),
        PLACING,
        PlaceGang,
        "refused",
        nodes=8,
        **GANG,
    ),
    case("pods that have not joined", seen(gang=gang(joined=7)), PLACING, PlaceGang, "7 of 8", nodes=8, **GANG),
    case("a whole gang", seen(gang=gang()), PLACING, StartAttempt, "trainer-abc123-1", IMAGE, nodes=8),
    case("a smaller gang", seen((LOST,), gang=gang(4)), PLACING, StartAttempt, "trainer-abc123-2", nodes=4),
    case(
        "an isolated attempt",
        seen(mode="isolated", gang=gang(**NO_PODS)),
        PLACING,
        StartAttempt,
        "trainer-abc123-1",
        nodes=8,
    ),
    case(
        "an isolated attempt beside kept pods",
        seen(mode="isolated", gang=gang(**OTHER_PODS)),
        PLACING,
        EmptyGroup,
        **GANG,
    ),
    case(
        "a lost node without a spare",
        seen((LOST,), gang=gang(missing="7 of 8", room=7), **waited(Awaited.GANG, LONG)),
        PLACING,
        ShrinkGang,
        "8 nodes",
        "301 s",
        "room for 7",
        waits_for=Awaited.NOTHING,
        nodes=4,
    ),
    case(
        "a missing node before the first attempt",
        seen(gang=gang(missing="7 of 8", room=7), **waited(Awaited.GANG, LONG)),
        PLACING,
        PlaceGang,
        "7 of 8",
        nodes=8,
        **GANG,
    ),
    case(
        "the end of the wait",
        seen(gang=gang(missing="7 of 8"), **waited(Awaited.GANG, PATIENCE + 1)),
        PLACING,
        EndDeployment,
        "1800 s",
        "7 of 8",
        exit_code=75,
    ),
    case(
        "a longer wait after a loss",
        seen((LOST,), gang=gang(missing="7 of 8"), **waited(Awaited.GANG, PATIENCE + 1)),
        PLACING,
        PlaceGang,
        "7 of 8",
        nodes=8,
        **GANG,
    ),
    case(
        "the end of the wait after a loss",
        seen((LOST,), gang=gang(missing="7 of 8"), **waited(Awaited.GANG, LOSS_PATIENCE + 1)),
        PLACING,
        EndDeployment,
        "20000 s",
        "7 of 8",
        exit_code=75,
    ),
    case(
        "a shrunk gang, with a wait of its own",
        seen((LOST,), gang=gang(4, missing="3 of 4"), **waited(Awaited.NOTHING, PATIENCE + 1)),
        PLACING,
        PlaceGang,
        "3 of 4",
        nodes=4,
        **GANG,
    ),
    case("a pool to raise", seen(gang=gang(**NO_PODS, pool=UNRAISED)), PLACING, HoldNodes, UNRAISED.report, **GANG),
    case(
        "a pool to raise for an isolated attempt",
        seen(mode="isolated", gang=gang(**NO_PODS, pool=UNRAISED)),
        PLACING,
        HoldNodes,
        UNRAISED.report,
        **GANG,
    ),
    case(
        "nodes that start for an isolated attempt",
        seen(mode="isolated", gang=gang(**NO_PODS, pool=PoolState(report="2 of 8"))),
        PLACING,
        Wait,
        "2 of 8",
        **GANG,
    ),
    case(
        "nodes that start",
        seen(gang=gang(missing="7 of 8", pool=PoolState(report="7 nodes are ready"))),
        PLACING,
        PlaceGang,
        "7 of 8",
        "7 nodes are ready",
        nodes=8,
        **GANG,
    ),
    case(
        "nodes that do not come",
        seen(gang=gang(missing="7 of 8", pool=PoolState(report="no room")), **waited(Awaited.GANG, PATIENCE + 1)),
        PLACING,
        EndDeployment,
        "1800 s",
        "7 of 8",
        "no room",
        exit_code=75,
    ),
    case(
        "a pool that EKS does not raise",
        seen(gang=gang(pool=UNRAISED), **waited(Awaited.GANG, PATIENCE + 1)),
        PLACING,
        EndDeployment,
        "1800 s",
        UNRAISED.report,
        exit_code=75,
    ),
    case(
        "a pool that may not be raised",
        seen(gang=gang(pool=PoolState(is_raised=False, refusal="denied"))),
        PLACING,
        EndDeployment,
        "denied",
        exit_code=4,
    ),
    case(
        "another stage's nodes that start beside a whole gang",
        seen(gang=gang(pool=PoolState(report="9 of 10 nodes are ready"))),
        PLACING,
        StartAttempt,
        nodes=8,
    ),
    case(
        "a RayJob of an earlier deployment",
        seen(older_rayjobs=1),
        State.CLEARING,
        DeleteOlderRayJobs,
        "RayJob",
        waits_for=Awaited.OLDER_RAYJOBS,
    ),
    case(
        "an older RayJob that the operator does not remove",
        seen(older_rayjobs=1, **waited(Awaited.OLDER_RAYJOBS, OPERATOR_SECONDS + 1)),
        State.CLEARING,
        DeleteOlderRayJobs,
        "60 s",
        "grep kuberay",
        waits_for=Awaited.OLDER_RAYJOBS,
    ),
    case(
        "an older RayJob that stays",
        seen(older_rayjobs=1, **waited(Awaited.OLDER_RAYJOBS, PATIENCE + 1)),
        State.CLEARING,
        EndDeployment,
        "RayJob",
        "1800 s",
        exit_code=75,
    ),
    case(
        "pods that the operator does not make",
        seen(gang=gang(pods=7, joined=7, missing="7 of 8"), **waited(Awaited.GANG, OPERATOR_SECONDS + 1)),
        PLACING,
        PlaceGang,
        "7 of 8",
        "60 s",
        "grep kuberay",
        nodes=8,
        **GANG,
    ),
]
ENDED = {"waits_for": Awaited.NOTHING}
WITH_RAYJOB = [
    case("a running driver", seen(**driver(JobStatus.RUNNING)), State.RUNNING, Wait, "attempt 1", **ENDED),
    case(
        "a pending driver",
        seen(**driver(JobStatus.PENDING), missing="7 of 8"),
        State.PENDING,
        Wait,
        "7 of 8",
        waits_for=Awaited.DRIVER_RESOURCE,
    ),
    case(
        "a driver that stays pending",
        seen(**driver(JobStatus.PENDING), **waited(Awaited.DRIVER_RESOURCE, PENDING_SECONDS + 1)),
        State.PENDING,
        EndAttempt,
        "300 s",
        "stage_trainer",
        exit_code=75,
        is_driver_stopped=True,
        is_rayjob_kept=False,
        **ENDED,
    ),
    case("a driver to stop", seen(stop="ann", **driver(JobStatus.RUNNING)), State.STOPPING, StopDriver, "ann"),
    case(
        "a driver that succeeded",
        seen(**driver(JobStatus.SUCCEEDED, 0)),
        State.DRIVER_ENDED,
        EndAttempt,
        exit_code=0,
        is_driver_stopped=False,
        is_rayjob_kept=True,
        **ENDED,
    ),
    case(
        "a driver that was stopped",
        seen(stop="ann", **driver(JobStatus.STOPPED)),
        State.DRIVER_ENDED,
        EndAttempt,
        "ann",
        exit_code=75,
        is_rayjob_kept=True,
        **ENDED,
    ),
    case(
        "a driver with an error",
        seen(**driver(JobStatus.FAILED, 3, "millrace: no corpus")),
        State.DRIVER_ENDED,
        EndAttempt,
        "no corpus",
        exit_code=3,
        is_rayjob_kept=True,
        **ENDED,
    ),
    case(
        "a driver that was lost with its node",
        seen(**driver(JobStatus.FAILED, None, "died")),
        State.DRIVER_ENDED,
        EndAttempt,
        "died",
        exit_code=75,
        is_rayjob_kept=True,
        **ENDED,
    ),
    case(
        "an ended RayJob while Ray does not answer",
        seen(**placed(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED"), ray_error="refused"),
        State.RAYJOB_ENDED,
        EndAttempt,
        exit_code=0,
        is_rayjob_kept=True,
        **ENDED,
    ),
    case(
        "a stop before Ray knows the job",
        seen(stop="ann", **placed()),
        State.STOPPED_BEFORE_RUN,
        EndAttempt,
        "ann",
        exit_code=75,
        is_rayjob_kept=False,
        **ENDED,
    ),
    case("a job to submit", seen(**placed()), State.SUBMITTING, Wait, "operator", waits_for=Awaited.SUBMISSION),
    case(
        "a job that is not submitted",
        seen(**placed(jobDeploymentStatus="Initializing"), **waited(Awaited.SUBMISSION, SUBMIT_SECONDS + 1)),
        State.SUBMITTING,
        EndAttempt,
        "300 s",
        "Initializing",
        "k8s/README.md",
        exit_code=75,
        is_rayjob_kept=False,
        **ENDED,
    ),
    case(
        "a lost head",
        seen(**placed(jobStatus="RUNNING"), ray_error="refused"),
        State.HEAD_LOST,
        Wait,
        "head",
        waits_for=Awaited.HEAD,
    ),
    case(
        "a head that does not come back",
        seen(**placed(jobStatus="RUNNING"), ray_error="refused", **waited(Awaited.HEAD, HEAD_LOST_SECONDS + 1)),
        State.HEAD_LOST,
        EndAttempt,
        "refused",
        exit_code=75,
        is_rayjob_kept=False,
        **ENDED,
    ),
    case(
        "a starting cluster of an isolated attempt",
        seen(mode="isolated", **placed(), cluster_event="FailedMount: no claim"),
        State.CLUSTER_STARTING,
        Wait,
        "FailedMount: no claim",
        waits_for=Awaited.OWN_CLUSTER,
    ),
    case(
        "a cluster of an isolated attempt that does not start",
        seen(mode="isolated", **placed(), missing="0 of 8", **waited(Awaited.OWN_CLUSTER, PATIENCE + 1)),
        State.CLUSTER_STARTING,
        EndAttempt,
        "1800 s",
        "0 of 8",
        exit_code=75,
        is_rayjob_kept=False,
        **ENDED,
    ),
]
LEFT, DOWN, OPERATOR = State.NO_ATTEMPT_LEFT, State.TAKING_DOWN, {"waits_for": Awaited.OPERATOR}
ENDING = [
    case("success", seen((DONE,)), LEFT, EndDeployment, "done", exit_code=0),
    case("no retry left", seen((LOST, LOST)), LEFT, EndDeployment, "2 attempts", exit_code=75),
    case("an error", seen((LOST, Outcome(3, "no corpus"))), LEFT, EndDeployment, "no corpus", exit_code=3),
    case("a stop before the first attempt", seen(stop="ann"), LEFT, EndDeployment, "ann", exit_code=75),
    case("a stop after an attempt", seen((LOST,), stop="ann"), LEFT, EndDeployment, LOST.message, exit_code=75),
    case("an outcome", seen((DONE,), DONE), DOWN, TakeDown, ended_rayjobs=RAYJOBS, are_pods_kept=False, **OPERATOR),
    case(
        "an outcome that the operator does not see",
        seen((DONE,), DONE, **waited(Awaited.OPERATOR, SETTLE_SECONDS)),
        DOWN,
        TakeDown,
        ended_rayjobs=frozenset(),
        are_pods_kept=False,
        **OPERATOR,
    ),
    case(
        "KEEP=1",
        seen((DONE,), DONE, keep=True),
        DOWN,
        TakeDown,
        ended_rayjobs=RAYJOBS,
        are_pods_kept=True,
        **OPERATOR,
    ),
    case(
        "KEEP=1 without an attempt",
        seen((), LOST, keep=True),
        DOWN,
        TakeDown,
        ended_rayjobs=frozenset(),
        are_pods_kept=False,
        **OPERATOR,
    ),
]
ALL = [*WITHOUT_RAYJOB, *WITH_RAYJOB, *ENDING]


@pytest.mark.parametrize("case", ALL)
def test_an_observation_decides_the_action(case: Case) -> None:
    action = decide(case.observation)
    assert (case.observation.state, type(action), action.waits_for) == (case.state, case.kind, case.waits_for)
    source = action.outcome if isinstance(action, EndDeployment) else action
    assert {name: getattr(source, name) for name in case.values} == case.values
    text = f"{action.report} {getattr(source, 'message', '')}"
    assert [each for each in case.mentions if each not in text] == []


def test_every_state_and_every_action_is_in_the_table() -> None:
    cases = [each.values[0] for each in ALL]
    assert {each.state for each in cases} == set(State)
    assert {each.kind for each in cases} == set(Action.__subclasses__())


def test_a_gang_that_was_not_observed_is_a_bug() -> None:
    with pytest.raises(ValueError, match="gang"):
        decide(seen())
