"""EKS is busy, has no capacity, denies a call or does not answer: no deployment hangs, and no node is forgotten."""

from __future__ import annotations

import pytest

from k8s.controller.node_pool import RELEASE_SECONDS
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import ORPHAN_SECONDS
from tests.k8s.builders import REGION
from tests.k8s.cloud import POOL, Cloud, Refusal
from tests.k8s.world import Reconcile, World, complete_job, ended, reap


def refuse_the_lowering(world: World, status: int, code: str) -> list[Refusal]:
    """Let EKS refuse changes of the group from the attempt's end on. The list gets the refusal then."""
    refusals: list[Refusal] = []

    def attempt(number: int) -> DriverState:
        refusals.append(Refusal("UpdateNodegroupConfig", status, code))
        return ended(0)

    world.attempt = attempt
    return refusals


def test_eks_that_is_busy_is_asked_again(
    world: World, cloud: Cloud, reconcile: Reconcile, capsys: pytest.CaptureFixture[str]
) -> None:
    """EKS makes one update of a group at a time."""
    refusal = Refusal("UpdateNodegroupConfig", 409, "ResourceInUseException", times=3)
    assert reconcile().exit_code == 0
    assert refusal.left == 0
    assert cloud.sizes == [0, 2, 0]
    assert f"node group {POOL}: 0 -> 2 nodes, after the update" in capsys.readouterr().out


def test_nodes_that_do_not_come_are_given_up_after_the_wait(world: World, cloud: Cloud, reconcile: Reconcile) -> None:
    cloud.has_capacity = False
    cloud.set_health("AsgInstanceLaunchFailures", "We currently do not have sufficient trn1.32xlarge capacity")
    outcome = reconcile(start_timeout_seconds=600)
    assert outcome.exit_code == 75
    assert "not up after 600 s: 0 of 2 trainer pods are ready" in outcome.message
    assert f"0 of 2 nodes of node group {POOL} are ready; AsgInstanceLaunchFailures: We currently" in outcome.message
    assert cloud.sizes == [0, 2, 0]
    assert world.is_down


def test_an_account_that_may_not_resize_is_told_at_once(world: World, cloud: Cloud, reconcile: Reconcile) -> None:
    began = world.clock.now
    refusal = Refusal("UpdateNodegroupConfig", 403, "AccessDeniedException")
    outcome = reconcile()
    refusal.end()
    assert outcome.exit_code == 4
    assert "eks:UpdateNodegroupConfig on it" in outcome.message
    assert f"millrace-{REGION}-over-budget" in outcome.message
    assert world.clock.now - began < 60
    assert world.is_down


@pytest.mark.parametrize(
    ("status", "code", "waited_seconds"),
    [(403, "AccessDeniedException", 0.0), (503, "ServerException", RELEASE_SECONDS)],
)
def test_nodes_that_eks_does_not_take_back_are_left_to_the_reaper(
    world: World, cloud: Cloud, reconcile: Reconcile, status: int, code: str, waited_seconds: float
) -> None:
    """The budget's action takes the right from the deploy Job while a stage runs; the reaper keeps it."""
    refusals = refuse_the_lowering(world, status, code)
    began = world.clock.now
    assert reconcile().exit_code == 0
    assert waited_seconds <= world.clock.now - began < waited_seconds + 120
    assert (cloud.size, world.held) == (2, {"trainer": 2})
    refusals[0].end()
    complete_job(world)
    reap(world, 2 * ORPHAN_SECONDS)
    assert cloud.size == 0
    assert world.is_down
