"""The reconciler's decision as a table: what is observed, and the one thing that is done."""

from __future__ import annotations

from typing import Any

import pytest
from ray.job_submission import JobStatus

from k8s.controller.decision import (
    HEAD_LOST_SECONDS,
    PENDING_SECONDS,
    SETTLE_SECONDS,
    SUBMIT_SECONDS,
    WHOLE_GANG_SECONDS,
    Action,
    DeleteOlderRayJobs,
    EmptyGroup,
    EndAttempt,
    EndDeployment,
    Gang,
    HoldNodes,
    Observation,
    PlaceGang,
    ShrinkGang,
    StartAttempt,
    StopDriver,
    TakeDown,
    Wait,
    decide,
)
from k8s.controller.node_pool import PoolState
from k8s.controller.ray_jobs import DriverState
from k8s.objects.placement import OPERATOR_SECONDS
from k8s.objects.record import Outcome, Record
from tests.k8s.builders import deployment_of

IMAGE = deployment_of().image
PATIENCE = 1_800.0
LOSS_PATIENCE = 20_000.0
LOST = Outcome(75, "the driver was lost")
DONE = Outcome(0, "done")
RAYJOBS = frozenset({"trainer-abc123-1"})


def seen(
    attempts: tuple[Outcome, ...] = (), outcome: Outcome | None = None, stop: str = "", **observed: Any
) -> Observation:
    """Of a deployment of 8 nodes that may go on with 4."""
    wanted: dict[str, Any] = {"nodes": 8, "fewer_nodes": (4,), "start_timeout_seconds": int(PATIENCE), "retries": 1}
    wanted |= {"loss_timeout_seconds": int(LOSS_PATIENCE)}
    wanted |= {name: observed.pop(name) for name in ("mode", "keep") if name in observed}
    record = Record(deployment_of(**wanted), "u", "1", attempts, {}, outcome, stop, False, False, "now")
    return Observation(record, **observed)


def gang(nodes: int = 8, **changes: Any) -> Gang:
    """One that stands."""
    standing: dict[str, Any] = {"replicas": nodes, "pods": nodes, "is_up_to_date": True, "joined": nodes}
    return Gang(nodes, **standing | changes)


def waited(what: str, seconds: float) -> dict[str, Any]:
    return {"waiting_for": what, "waited_seconds": seconds}


def placed(**status: str) -> dict[str, Any]:
    return {"rayjob": {"status": status, "spec": {}}}


def driver(status: JobStatus, exit_code: int | None = None, message: str = "") -> dict[str, Any]:
    return placed(jobStatus="RUNNING") | {"driver": DriverState(status, exit_code, message, 1)}


PENDING = driver(JobStatus.PENDING)

# (what it is, what is observed, what is done)
PLACING: list[tuple[str, Observation, Action]] = [
    (
        "another deployment's pods",
        seen(gang=gang(replicas=2, pods=2, is_up_to_date=False)),
        EmptyGroup(report="waiting for trainer pods that were there before to leave", waits_for="a gang of 8"),
    ),
    (
        "pods that still leave",
        seen(gang=gang(replicas=0, pods=2, is_up_to_date=False)),
        EmptyGroup(report="waiting for trainer pods that were there before to leave", waits_for="a gang of 8"),
    ),
    (
        "more pods than the attempt may have",
        seen((LOST,), gang=gang(nodes=4, replicas=8)),
        EmptyGroup(report="waiting for trainer pods that were there before to leave", waits_for="a gang of 4"),
    ),
    (
        "an empty group",
        seen(gang=gang(replicas=0, pods=0, is_up_to_date=False)),
        PlaceGang(nodes=8, report=f"trainer: 0 -> 8 pods of {IMAGE}", waits_for="a gang of 8"),
    ),
    (
        "fewer pods of the same kind",
        seen(gang=gang(replicas=4, pods=4)),
        PlaceGang(nodes=8, report=f"trainer: 4 -> 8 pods of {IMAGE}", waits_for="a gang of 8"),
    ),
    (
        "pods that are not ready",
        seen(gang=gang(missing="7 of 8 trainer pods are ready: why")),
        PlaceGang(nodes=8, report="7 of 8 trainer pods are ready: why", waits_for="a gang of 8"),
    ),
    (
        "a head that does not answer",
        seen(gang=gang(joined=0, ray_error="refused")),
        PlaceGang(nodes=8, report="waiting for the Ray head: refused", waits_for="a gang of 8"),
    ),
    (
        "pods that have not joined",
        seen(gang=gang(joined=7)),
        PlaceGang(nodes=8, report="7 of 8 trainer pods have joined Ray", waits_for="a gang of 8"),
    ),
    (
        "a gang that stands",
        seen(gang=gang()),
        StartAttempt(nodes=8, report=f"attempt 1: RayJob trainer-abc123-1 runs {IMAGE} on 8 nodes"),
    ),
    (
        "a gang that stands after a loss",
        seen((LOST,), gang=gang(4)),
        StartAttempt(nodes=4, report=f"attempt 2: RayJob trainer-abc123-2 runs {IMAGE} on 4 nodes"),
    ),
    (
        "a cluster of its own, which the RayJob brings",
        seen(mode="isolated", gang=gang(replicas=0, pods=0, is_up_to_date=False, joined=0)),
        StartAttempt(nodes=8, report=f"attempt 1: RayJob trainer-abc123-1 runs {IMAGE} on 8 nodes"),
    ),
    (
        "a cluster of its own beside pods that were left up",
        seen(mode="isolated", gang=gang(replicas=2, pods=2, is_up_to_date=False)),
        EmptyGroup(report="waiting for trainer pods that were there before to leave", waits_for="a gang of 8"),
    ),
    (
        "no node for one pod, after a loss",
        seen((LOST,), gang=gang(missing="7 of 8", room=7), **waited("a gang of 8", WHOLE_GANG_SECONDS + 1)),
        ShrinkGang(
            nodes=4,
            report="no 8 nodes after 301 s, room for 7: this attempt goes on with 4",
            waits_for="a gang of 8",
        ),
    ),
    (
        "no node for one pod, at first",
        seen(gang=gang(missing="7 of 8", room=7), **waited("a gang of 8", WHOLE_GANG_SECONDS + 1)),
        PlaceGang(nodes=8, report="7 of 8", waits_for="a gang of 8"),
    ),
    (
        "a gang that cannot be had",
        seen(gang=gang(missing="7 of 8"), **waited("a gang of 8", PATIENCE + 1)),
        EndDeployment(outcome=Outcome(75, "not up after 1800 s: 7 of 8")),
    ),
    (
        "a gang that cannot be had again for a while",
        seen((LOST,), gang=gang(missing="7 of 8"), **waited("a gang of 8", PATIENCE + 1)),
        PlaceGang(nodes=8, report="7 of 8", waits_for="a gang of 8"),
    ),
    (
        "a gang that cannot be had again",
        seen((LOST,), gang=gang(missing="7 of 8"), **waited("a gang of 8", LOSS_PATIENCE + 1)),
        EndDeployment(outcome=Outcome(75, "not up after 20000 s: 7 of 8")),
    ),
    (
        "a gang that is waited for anew",
        seen((LOST,), gang=gang(nodes=4, missing="3 of 4"), **waited("a gang of 8", PATIENCE + 1)),
        PlaceGang(nodes=4, report="3 of 4", waits_for="a gang of 4"),
    ),
    (
        "nodes that are still to come",
        seen(gang=gang(replicas=0, pods=0, is_up_to_date=False, pool=PoolState(is_raised=False, report="0 -> 8"))),
        HoldNodes(report="0 -> 8", waits_for="a gang of 8"),
    ),
    (
        "nodes that are still to come, for a cluster of its own",
        seen(mode="isolated", gang=gang(replicas=0, pods=0, pool=PoolState(is_raised=False, report="0 -> 8"))),
        HoldNodes(report="0 -> 8", waits_for="a gang of 8"),
    ),
    (
        "nodes that start, for a cluster of its own, which comes after them",
        seen(mode="isolated", gang=gang(replicas=0, pods=0, is_up_to_date=False, pool=PoolState(report="2 of 8"))),
        Wait(report="2 of 8", waits_for="a gang of 8"),
    ),
    (
        "nodes that start",
        seen(gang=gang(missing="7 of 8", pool=PoolState(report="7 nodes are ready"))),
        PlaceGang(nodes=8, report="7 of 8; 7 nodes are ready", waits_for="a gang of 8"),
    ),
    (
        "nodes that do not come",
        seen(gang=gang(missing="7 of 8", pool=PoolState(report="7 are ready")), **waited("a gang of 8", PATIENCE + 1)),
        EndDeployment(outcome=Outcome(75, "not up after 1800 s: 7 of 8; 7 are ready")),
    ),
    (
        "a pool that EKS does not raise",
        seen(gang=gang(pool=PoolState(is_raised=False, report="busy")), **waited("a gang of 8", PATIENCE + 1)),
        EndDeployment(outcome=Outcome(75, "not up after 1800 s: busy")),
    ),
    (
        "a pool that may not be raised",
        seen(gang=gang(pool=PoolState(is_raised=False, refusal="denied"))),
        EndDeployment(outcome=Outcome(4, "denied")),
    ),
    (
        "nodes of another stage that start while the gang stands",
        seen(gang=gang(pool=PoolState(report="9 of 10 nodes are ready"))),
        StartAttempt(nodes=8, report=f"attempt 1: RayJob trainer-abc123-1 runs {IMAGE} on 8 nodes"),
    ),
    (
        "a RayJob of an earlier deployment",
        seen(older_rayjobs=1),
        DeleteOlderRayJobs(
            report="waiting for the KubeRay operator to end and remove an earlier attempt's RayJob",
            waits_for="a RayJob to go",
        ),
    ),
    (
        "one that takes longer than the operator needs",
        seen(older_rayjobs=1, **waited("a RayJob to go", OPERATOR_SECONDS + 1)),
        DeleteOlderRayJobs(
            report="waiting for the KubeRay operator to end and remove an earlier attempt's RayJob for more than "
            "60 s. Does the KubeRay operator run? kubectl get pods -A | grep kuberay",
            waits_for="a RayJob to go",
        ),
    ),
    (
        "pods that the operator has still to make",
        seen(gang=gang(pods=7, joined=7, missing="7 of 8"), **waited("a gang of 8", OPERATOR_SECONDS)),
        PlaceGang(nodes=8, report="7 of 8", waits_for="a gang of 8"),
    ),
    (
        "pods that the operator does not make",
        seen(gang=gang(pods=7, joined=7, missing="7 of 8"), **waited("a gang of 8", OPERATOR_SECONDS + 1)),
        PlaceGang(
            nodes=8,
            report="7 of 8; waited for more than 60 s. Does the KubeRay operator run? kubectl get pods -A | grep "
            "kuberay",
            waits_for="a gang of 8",
        ),
    ),
    (
        "one that does not go",
        seen(older_rayjobs=1, **waited("a RayJob to go", PATIENCE + 1)),
        EndDeployment(outcome=Outcome(75, "an earlier attempt's RayJob does not go")),
    ),
    (
        "a stop request before the gang stands",
        seen(stop="ann", gang=gang(missing="7 of 8")),
        EndDeployment(outcome=Outcome(75, "stopped by ann; the same command continues")),
    ),
]

FOLLOWING: list[tuple[str, Observation, Action]] = [
    (
        "a driver that runs",
        seen(**driver(JobStatus.RUNNING)),
        Wait(report="attempt 1 is running", waits_for=""),
    ),
    (
        "a driver without a resource",
        seen(**PENDING, missing="7 of 8"),
        Wait(report="the job is pending; 7 of 8", waits_for="a resource"),
    ),
    (
        "a driver that never gets one",
        seen(**PENDING, **waited("a resource", PENDING_SECONDS + 1)),
        EndAttempt(
            exit_code=75,
            message="the job was pending for 300 s: no live Ray node has stage_trainer to give; all pods are ready",
            is_driver_stopped=True,
            waits_for="",
        ),
    ),
    (
        "a driver that is to stop",
        seen(stop="ann", **driver(JobStatus.RUNNING)),
        StopDriver(report="stopping for ann: the driver has its notice"),
    ),
    (
        "a driver that ended well",
        seen(**driver(JobStatus.SUCCEEDED, 0)),
        EndAttempt(exit_code=0, message="done", is_rayjob_kept=True, waits_for=""),
    ),
    (
        "a driver that was stopped",
        seen(stop="ann", **driver(JobStatus.STOPPED)),
        EndAttempt(
            exit_code=75, message="stopped by ann; the same command continues", is_rayjob_kept=True, waits_for=""
        ),
    ),
    (
        "a driver that found an error",
        seen(**driver(JobStatus.FAILED, 3, "millrace: no corpus")),
        EndAttempt(exit_code=3, message="no corpus", is_rayjob_kept=True, waits_for=""),
    ),
    (
        "a driver that was lost with its node",
        seen(**driver(JobStatus.FAILED, None, "died")),
        EndAttempt(exit_code=75, message="the driver was lost: died", is_rayjob_kept=True, waits_for=""),
    ),
    (
        "a RayJob that ended while Ray does not answer",
        seen(**placed(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED"), ray_error="refused"),
        EndAttempt(exit_code=0, message="done", is_rayjob_kept=True, waits_for=""),
    ),
    (
        "a RayJob that is to stop before Ray knows it",
        seen(stop="ann", **placed()),
        EndAttempt(exit_code=75, message="stopped by ann before its driver ran", waits_for=""),
    ),
    (
        "a RayJob that is not submitted yet",
        seen(**placed()),
        Wait(report="waiting for the operator to submit the job", waits_for="submission"),
    ),
    (
        "a RayJob that is never submitted",
        seen(**placed(jobDeploymentStatus="Initializing"), **waited("submission", SUBMIT_SECONDS + 1)),
        EndAttempt(
            exit_code=75,
            message="the operator did not submit the job within 300 s; its RayJob says Initializing. Does the operator "
            "run, without a batch scheduler of its own (k8s/README.md)?",
            waits_for="",
        ),
    ),
    (
        "a head that is lost",
        seen(**placed(jobStatus="RUNNING"), ray_error="refused"),
        Wait(report="the Ray head does not answer; a new one runs this attempt again by itself", waits_for="the head"),
    ),
    (
        "a head that does not come back",
        seen(**placed(jobStatus="RUNNING"), ray_error="refused", **waited("the head", HEAD_LOST_SECONDS + 1)),
        EndAttempt(exit_code=75, message="the Ray head was lost: refused", waits_for=""),
    ),
    (
        "a cluster of its own that starts",
        seen(mode="isolated", **placed(), cluster_event="FailedMount: no claim"),
        Wait(report="its Ray head is starting (FailedMount: no claim)", waits_for="its cluster"),
    ),
    (
        "a cluster of its own that never stands",
        seen(mode="isolated", **placed(), missing="0 of 8", **waited("its cluster", PATIENCE + 1)),
        EndAttempt(exit_code=75, message="not up after 1800 s: 0 of 8", waits_for=""),
    ),
]

SETTLING = "the operator to see the end"
ENDING: list[tuple[str, Observation, Action]] = [
    ("an attempt that ended well", seen((DONE,)), EndDeployment(outcome=DONE)),
    (
        "one disturbance too many",
        seen((LOST, LOST)),
        EndDeployment(outcome=Outcome(75, "the driver was lost after 2 attempts")),
    ),
    (
        "an error that no attempt mends",
        seen((LOST, Outcome(3, "no corpus"))),
        EndDeployment(outcome=Outcome(3, "no corpus after 2 attempts")),
    ),
    ("a stop request after an attempt", seen((LOST,), stop="ann"), EndDeployment(outcome=LOST)),
    (
        "an outcome",
        seen((DONE,), DONE),
        TakeDown(ended_rayjobs=RAYJOBS, are_pods_kept=False, waits_for=SETTLING),
    ),
    (
        "an outcome whose RayJob the operator does not see",
        seen((DONE,), DONE, **waited(SETTLING, SETTLE_SECONDS)),
        TakeDown(ended_rayjobs=frozenset(), are_pods_kept=False, waits_for=SETTLING),
    ),
    (
        "an outcome with KEEP=1",
        seen((DONE,), DONE, keep=True),
        TakeDown(ended_rayjobs=RAYJOBS, are_pods_kept=True, waits_for=SETTLING),
    ),
    (
        "an outcome with KEEP=1 of pods that never stood",
        seen((), LOST, keep=True),
        TakeDown(ended_rayjobs=frozenset(), are_pods_kept=False, waits_for=SETTLING),
    ),
]


@pytest.mark.parametrize(
    ("observation", "action"),
    [pytest.param(observation, action, id=what) for what, observation, action in [*PLACING, *FOLLOWING, *ENDING]],
)
def test_what_is_observed_decides_what_is_done(observation: Observation, action: Action) -> None:
    assert decide(observation) == action


@pytest.mark.parametrize("observation", [each for _, each, _ in PLACING if not each.record.stop])
def test_whoever_places_a_gang_has_looked_for_it(observation: Observation) -> None:
    assert observation.is_start_due


@pytest.mark.parametrize("observation", [each for _, each, _ in [*FOLLOWING, *ENDING]])
def test_nobody_looks_for_a_gang_that_is_not_to_be_placed(observation: Observation) -> None:
    assert not observation.is_start_due


def test_a_look_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ValueError, match="without a look at its gang"):
        decide(seen())


def test_every_action_is_decided_on_somewhere() -> None:
    decided = {type(action) for _, _, action in [*PLACING, *FOLLOWING, *ENDING]}
    assert decided == set(Action.__subclasses__())
