"""Tables for the parts of the controller: retries, states, sizes of a gang, lost pods, the Lease."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s.controller.history import find_newest_checkpoints
from k8s.controller.observation import has_progressed, may_try_again
from k8s.controller.ray_jobs import DriverLog
from k8s.objects.lost_pods import LostPods, loss_of
from k8s.objects.record import FULL_MESSAGES, Outcome, Record, shorten
from tests.k8s.builders import READY, Clock, deployment_of, node, pod
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing

LOST, MOVED = Outcome(75, "the driver was lost"), Outcome(75, "the driver was lost", progressed=True)


@pytest.mark.parametrize(
    ("attempts", "goes_on"),
    [
        ((LOST,), True),
        ((LOST, LOST, LOST), True),
        ((LOST, LOST, LOST, LOST), False),
        ((MOVED, MOVED, MOVED, MOVED, MOVED, MOVED), True),  # a run of weeks
        ((LOST, LOST, LOST, MOVED, LOST, LOST), True),
        ((LOST, LOST, MOVED, LOST, LOST, LOST), False),
        ((MOVED, Outcome(3, "no corpus")), False),
    ],
)
def test_retries_count_disturbances_since_the_newest_checkpoint(attempts: tuple[Outcome, ...], goes_on: bool) -> None:
    record = Record(deployment_of(), "u", "1", attempts, {}, None, "", False, False, "now")
    assert may_try_again(record) is goes_on


@pytest.mark.parametrize(
    ("before", "after", "message", "expected"),
    [
        ({"a-0": 100}, {"a-0": 200}, "the driver was lost", True),
        ({"a-0": 100}, {"a-0": 100}, "the driver was lost", False),
        ({}, {"a-0": 100}, "the driver was lost", True),
        ({"a-0": 500}, {"a-0": 500, "a-1": 100}, "the driver was lost", True),
        ({"a-0": 500}, {}, "the driver was lost", False),
        ({"a-0": 100}, {"a-0": 200}, "Stopped by preemption after step 200; its checkpoint is committed.", True),
        ({"a-0": 100}, {"a-0": 200}, "Stopped by time limit after step 200; its checkpoint is committed.", False),
        ({"a-0": 100}, {"a-0": 200}, "Stopped by stop file after step 200; its checkpoint is committed.", False),
    ],
)
def test_progress_is_a_newer_checkpoint_after_a_disturbance(
    before: dict[str, int], after: dict[str, int], message: str, expected: bool
) -> None:
    assert has_progressed(before, after, message) is expected


def test_only_committed_checkpoints_of_the_recipe_count(tmp_path: Path) -> None:
    for name, is_committed in {
        "small-0123abcd/step-00000100": True,
        "small-0123abcd/step-00000200": True,
        "small-0123abcd/step-00000300": False,
        "small-0123abcd/step-00000900-by-hand": True,
        "small-fedc4321/step-00000050": True,
        "small-two-0123abcd/step-00000700": True,
        "other-0123abcd/step-00000800": True,
    }.items():
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
        if is_committed:
            (tmp_path / "checkpoint" / name / "manifest.json").touch()

    assert find_newest_checkpoints(tmp_path, "small") == {"small-0123abcd": 200, "small-fedc4321": 50}
    assert find_newest_checkpoints(tmp_path / "elsewhere", "small") == {}


def test_a_thousand_attempts_fit_into_an_annotation() -> None:
    attempts = shorten((Outcome(75, "x" * 500, True),) * 1_000)
    assert len(attempts) == 1_000
    assert sum(len(each.message) for each in attempts) < 128 * 2**10
    assert {len(each.message) for each in attempts[-FULL_MESSAGES:]} == {500}


FAULT = {"type": "AcceleratedHardwareReady", "status": "False", "reason": "NeuronHBMUncorrectableError"}


@pytest.mark.parametrize(
    ("taints", "conditions", "is_lost", "has_fault"),
    [
        ([], [READY], False, False),
        ([{"key": "node.kubernetes.io/unschedulable"}], [READY], False, False),
        ([{"key": "node.kubernetes.io/unreachable"}], [{"type": "Ready", "status": "Unknown"}], True, False),
        ([], [{"type": "Ready", "status": "Unknown"}], True, False),
        ([{"key": "node.kubernetes.io/not-ready"}], [{"type": "Ready", "status": "False"}], True, False),
        ([], [READY, FAULT], True, True),
        ([], [READY, {"type": "NeuronHealth", "status": "True"}], True, True),
        ([], [READY, {"type": "NeuronHealth", "status": "False"}, FAULT | {"status": "True"}], False, False),
        ([], [READY, FAULT | {"status": "Unknown"}], False, False),
    ],
)
def test_a_lost_node(taints: list[Thing], conditions: list[Thing], is_lost: bool, has_fault: bool) -> None:
    loss = loss_of(node("n", taints, conditions))
    assert (loss is not None, bool(loss and loss.is_fault)) == (is_lost, has_fault)


TERMINATING: dict[str, Any] = {"deletionTimestamp": "yesterday", "deletionGracePeriodSeconds": 330}


def test_pods_of_lost_nodes_go_after_their_grace_period(clock: Clock) -> None:
    """The grace period is measured by this process's clock, not from the time that another machine wrote."""
    api = MemoryApi(
        node("well", [], [READY]),
        node("dark", [{"key": "node.kubernetes.io/unreachable"}], [{"type": "Ready", "status": "Unknown"}]),
        pod("leaves", "well", **TERMINATING),
        pod("starts", "well"),
        pod("stuck", "dark", **TERMINATING),
        pod("silent", "dark"),
        pod("machine-gone", "gone", **TERMINATING),
        pod("deployer", "dark", "deploy", **TERMINATING),
        pod("one-off", "dark", "one-off", **TERMINATING),
        pod("another-stage", "dark", "compiler", **TERMINATING),
    )
    said: list[str] = []
    lost = LostPods(api, "trainer", said.append)  # type: ignore[arg-type]

    assert lost.remove(is_idle=False) == 4
    everyone = api.names("Pod")
    clock.now += 31
    lost.remove(is_idle=False)
    everyone.remove("deployer")  # whoever holds the Lease goes on, and its Job is not over before it is gone
    assert api.names("Pod") == everyone
    clock.now += 250
    lost.remove(is_idle=False)
    assert api.names("Pod") == everyone
    clock.now += 51
    lost.remove(is_idle=False)
    assert api.names("Pod") == ["another-stage", "leaves", "silent", "starts"]
    assert any("pod stuck is on node dark" in line and "by force" in line for line in said)
    assert len(said) == len(set(said)), "nothing is said twice"


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_a_driver_s_log_is_kept_once_and_shown_without_ray_s_state_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """Another process has written a part of it, and the stream starts from its beginning, however it is cut."""
    text = "step 1\n\x1b[36m(raylet)\x1b[0m [state-dump] NodeManager:\n(raylet) [state-dump] 17 more\nstep 2\nstep 3"
    (tmp_path / "job-5.log").write_text("step 1\n")

    class Jobs:
        def follow_log(self, name: str, write: Callable[[str], None]) -> None:
            for at in range(0, len(text), size):
                write(text[at : at + size])

    DriverLog(Jobs(), "job", 5, tmp_path).close(60)  # type: ignore[arg-type]
    assert (tmp_path / "job-5.log").read_text() == text
    assert capsys.readouterr().out == "step 2\nstep 3\n"
