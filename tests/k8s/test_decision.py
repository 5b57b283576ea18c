"""The controller's decision as a table: an observation, the state that follows from it, and the action."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from k8s.controller.decision import DRIVER_SECONDS, WHOLE_GANG_SECONDS, Action, Step, decide
from k8s.controller.node_pool import PoolState
from k8s.controller.observation import Gang, Observation, State
from k8s.controller.ray_jobs import DriverState
from k8s.objects.record import Acceptance, Outcome, Record
from tests.k8s.builders import deployment_of

PATIENCE = 1_800.0
LOSS_PATIENCE = 20_000.0
LONG = WHOLE_GANG_SECONDS + 1
LOST = Outcome(75, "the driver was lost")
DONE = Outcome(0, "done")
UNRAISED = PoolState(is_raised=False, report="node group: 0 -> 8")


def seen(
    attempts: tuple[Outcome, ...] = (), outcome: Outcome | None = None, stop: str = "", **observed: Any
) -> Observation:
    """An observation of a deployment of 8 nodes that may continue on 4."""
    wanted: dict[str, Any] = {"nodes": 8, "fewer_nodes": (4,), "start_timeout_seconds": int(PATIENCE), "retries": 1}
    wanted |= {"loss_timeout_seconds": int(LOSS_PATIENCE)}
    wanted |= {name: observed.pop(name) for name in ("mode", "keep") if name in observed}
    record = Record(deployment_of(**wanted), "u", "1", attempts, {}, outcome, stop, False, False, "now", Acceptance())
    return Observation(record, **observed)


def gang(nodes: int = 8, **changes: Any) -> Gang:
    """A gang whose pods have all joined Ray, with changes."""
    standing: dict[str, Any] = {"replicas": nodes, "pods": nodes, "is_up_to_date": True}
    return Gang(nodes, **standing | changes)


def placed(**status: str) -> dict[str, Any]:
    return {"rayjob": {"status": status, "spec": {}}}


def driver(status: JobStatus, exit_code: int | None = None, message: str = "") -> dict[str, Any]:
    return placed(jobStatus="RUNNING") | {"driver": DriverState(status, exit_code, message, 1)}


def ended(exit_code: int) -> Action:
    return Action(Step.END_ATTEMPT, outcome=Outcome(exit_code, ""))


def over(exit_code: int) -> Action:
    return Action(Step.END_DEPLOYMENT, outcome=Outcome(exit_code, ""))


Row = tuple[str, Observation, Action]
"""A name, an observation, and the action without its prose."""

OTHER_PODS = {"replicas": 2, "pods": 2, "is_up_to_date": False}
NO_PODS = {"replicas": 0, "pods": 0, "is_up_to_date": False}
PLACE, EMPTY, HOLD = Action(Step.PLACE_GANG, nodes=8), Action(Step.EMPTY_GROUP), Action(Step.HOLD_NODES)
WAIT, STOP, TAKE_DOWN = Action(Step.WAIT), Action(Step.STOP_DRIVER), Action(Step.TAKE_DOWN)
STOP_OLDER = Action(Step.STOP_OLDER_RAYJOBS)
WITHOUT_RAYJOB: list[Row] = [
    ("another deployment's pods", seen(gang=gang(**OTHER_PODS)), EMPTY),
    ("terminating pods", seen(gang=gang(replicas=0, pods=2, is_up_to_date=False)), EMPTY),
    ("more pods than nodes", seen((LOST,), gang=gang(4, replicas=8)), EMPTY),
    ("an empty group", seen(gang=gang(**NO_PODS)), PLACE),
    ("too few pods", seen(gang=gang(replicas=4, pods=4)), PLACE),
    ("pods that have not joined Ray", seen(gang=gang(missing="7 of 8")), PLACE),
    ("a whole gang", seen(gang=gang()), Action(Step.START_ATTEMPT, nodes=8)),
    ("a smaller gang", seen((LOST,), gang=gang(4)), Action(Step.START_ATTEMPT, nodes=4)),
    ("an isolated attempt", seen(mode="isolated", gang=gang(**NO_PODS)), Action(Step.START_ATTEMPT, nodes=8)),
    ("an isolated attempt beside kept pods", seen(mode="isolated", gang=gang(**OTHER_PODS)), EMPTY),
    (
        "a lost node without a spare",
        seen((LOST,), gang=gang(missing="7 of 8", room=7), waited_seconds=LONG),
        Action(Step.SHRINK_GANG, nodes=4),
    ),
    (
        "less room than the recipe allows, so that it waits for nodes",
        seen((LOST,), gang=gang(missing="1 of 8", room=3), waited_seconds=LONG),
        PLACE,
    ),
    ("a missing node before the first attempt", seen(gang=gang(missing="7 of 8", room=7), waited_seconds=LONG), PLACE),
    ("the end of the wait", seen(gang=gang(missing="7 of 8"), waited_seconds=PATIENCE + 1), over(75)),
    ("a longer wait after a loss", seen((LOST,), gang=gang(missing="7 of 8"), waited_seconds=PATIENCE + 1), PLACE),
    (
        "the end of the wait after a loss",
        seen((LOST,), gang=gang(missing="7 of 8"), waited_seconds=LOSS_PATIENCE + 1),
        over(75),
    ),
    (
        "a shrunk gang, with a wait of its own",
        seen((LOST,), gang=gang(4, missing="3 of 4"), waited_seconds=PATIENCE + 1),
        Action(Step.PLACE_GANG, nodes=4),
    ),
    ("a pool to raise", seen(gang=gang(**NO_PODS, pool=UNRAISED)), HOLD),
    (
        "nodes that start for an isolated attempt",
        seen(mode="isolated", gang=gang(**NO_PODS, pool=PoolState(report="2 of 8"))),
        WAIT,
    ),
    ("nodes that start", seen(gang=gang(missing="7 of 8", pool=PoolState(report="7 nodes are ready"))), PLACE),
    ("a pool that EKS does not raise", seen(gang=gang(pool=UNRAISED), waited_seconds=PATIENCE + 1), over(75)),
    ("a RayJob of an earlier deployment", seen(has_older_rayjobs=True), STOP_OLDER),
    ("an older RayJob that stays", seen(has_older_rayjobs=True, waited_seconds=PATIENCE + 1), over(75)),
]
WITH_RAYJOB: list[Row] = [
    ("a running driver", seen(**driver(JobStatus.RUNNING)), WAIT),
    ("a pending driver", seen(**driver(JobStatus.PENDING), missing="7 of 8"), WAIT),
    (
        "a driver that stays pending",
        seen(**driver(JobStatus.PENDING), waited_seconds=DRIVER_SECONDS + 1),
        ended(75),
    ),
    ("a driver to stop", seen(stop="ann", **driver(JobStatus.RUNNING)), STOP),
    ("a driver that succeeded", seen(**driver(JobStatus.SUCCEEDED, 0)), ended(0)),
    ("a driver that was stopped", seen(stop="ann", **driver(JobStatus.STOPPED)), ended(75)),
    (
        "a driver with an error",
        seen(**driver(JobStatus.FAILED, 3, "millrace: no corpus")),
        ended(3),
    ),
    (
        "a driver that was lost with its node",
        seen(**driver(JobStatus.FAILED, None, "died")),
        ended(75),
    ),
    (
        "an ended RayJob while Ray does not answer",
        seen(**placed(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED"), ray_error="refused"),
        ended(0),
    ),
    ("a stop before Ray knows the job", seen(stop="ann", **placed()), ended(75)),
    ("a job to submit", seen(**placed()), WAIT),
    ("a stop while the head is lost", seen(stop="ann", **placed(jobStatus="RUNNING"), ray_error="refused"), WAIT),
    (
        "a RayJob that the operator refused",
        seen(**placed(jobDeploymentStatus="ValidationFailed")),
        ended(4),
    ),
    (
        "the end that a RayJob tells of",
        seen(**placed(jobDeploymentStatus="Failed", message="entrypoint command failed with exit code 5, logs")),
        ended(5),
    ),
    (
        "an ended RayJob that tells no exit code",
        seen(**placed(jobDeploymentStatus="Failed", message="the cluster was lost")),
        ended(75),
    ),
    (
        "a driver that runs although its RayJob failed",
        seen(**driver(JobStatus.RUNNING) | placed(jobDeploymentStatus="Failed")),
        WAIT,
    ),
    (
        "a job that a new head does not know, and the operator does not submit",
        seen(**placed(jobStatus="RUNNING"), waited_seconds=DRIVER_SECONDS + 1),
        ended(75),
    ),
    (
        "a job that is not submitted",
        seen(**placed(jobDeploymentStatus="Initializing"), waited_seconds=DRIVER_SECONDS + 1),
        ended(75),
    ),
    (
        "a head that does not come back",
        seen(**placed(jobStatus="RUNNING"), ray_error="refused", waited_seconds=DRIVER_SECONDS + 1),
        ended(75),
    ),
    (
        "a starting cluster of an isolated attempt",
        seen(mode="isolated", **placed(), missing="0 of 8"),
        WAIT,
    ),
    (
        "a cluster of an isolated attempt that does not start",
        seen(mode="isolated", **placed(), missing="0 of 8", waited_seconds=PATIENCE + 1),
        ended(75),
    ),
]
ENDING: list[Row] = [
    ("success", seen((DONE,)), over(0)),
    ("an error", seen((LOST, Outcome(3, "no corpus"))), over(3)),
    ("a stop before the first attempt", seen(stop="ann"), over(75)),
    ("a stop after an attempt", seen((LOST,), stop="ann"), over(75)),
    ("an outcome", seen((DONE,), DONE), TAKE_DOWN),
    ("KEEP=1", seen((DONE,), DONE, keep=True), Action(Step.STOP_RAYJOBS)),
    ("KEEP=1 without an attempt", seen((), LOST, keep=True), TAKE_DOWN),
]
ALL = [*WITHOUT_RAYJOB, *WITH_RAYJOB, *ENDING]


def without_prose(action: Action) -> Action:
    """The action with an empty report and message."""
    return replace(action, report="", outcome=replace(action.outcome, message="") if action.outcome else None)


@pytest.mark.parametrize(("observation", "expected"), [pytest.param(*row[1:], id=row[0]) for row in ALL])
def test_an_observation_decides_the_action(observation: Observation, expected: Action) -> None:
    assert without_prose(decide(observation)) == expected


def test_every_state_and_every_step_is_in_the_table() -> None:
    assert {observation.state for _, observation, _ in ALL} == set(State)
    assert {action.step for _, _, action in ALL} == set(Step)
