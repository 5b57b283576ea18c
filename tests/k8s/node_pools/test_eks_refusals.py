"""EKS is busy, has no capacity, denies a call or does not answer: no deployment hangs, and no node is forgotten."""

from __future__ import annotations

import pytest

from k8s.controller import reaper
from k8s.controller.node_pool import LOOK_SECONDS, RELEASE_SECONDS, NodeRelease
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import ORPHAN_SECONDS
from k8s.objects import eks
from tests.k8s.builders import REGION
from tests.k8s.cloud import POOL, Cloud, Refusal
from tests.k8s.node_pools.pool import give_back, hold
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


def test_a_group_that_is_gone_is_told_and_holds_nothing(world: World, cloud: Cloud, reconcile: Reconcile) -> None:
    def attempt(number: int) -> DriverState:
        cloud.delete()
        return ended(0)

    world.attempt = attempt
    assert reconcile().exit_code == 0
    assert world.is_down
    outcome = reconcile(id="def456")
    assert outcome.exit_code == 4
    assert "CLUSTER_NAME" in outcome.message


def test_a_group_that_is_looked_for_in_another_region_keeps_its_share(
    world: World, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """EKS calls such a group absent, too. Its nodes are ready, so its share must stay until they can be lowered."""
    hold(world, "trainer", 2)
    world.pass_time()
    refusal = Refusal("DescribeNodegroup", 404, "ResourceNotFoundException")
    with pytest.raises(eks.NodeGroupAbsent, match=r"2 nodes .* ready.* REGION"):
        give_back(world, "trainer")
    refusal.end()
    assert world.held == {"trainer": 2}
    give_back(world, "trainer")
    assert (cloud.size, world.held) == (0, {})


def test_a_reaper_goes_on_when_eks_does_not_answer(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next run of the CronJob comes 15 minutes later."""
    monkeypatch.setattr(reaper, "connect_patiently", lambda: world.api)
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    hold(world, "trainer", 2)
    refusal = Refusal("DescribeNodegroup", 503, "ServerException", times=4)
    assert reaper.main() == 0
    assert refusal.left == 0
    assert "reaper: describe node group millrace/trainium: ServerException" in capsys.readouterr().err
    assert (cloud.size, world.held) == (0, {})


def test_eks_is_left_in_peace_while_it_is_busy(world: World, cloud: Cloud) -> None:
    """EKS answers a few calls a second for a whole account."""
    hold(world, "trainer", 2)
    refusal = Refusal("UpdateNodegroupConfig", 409, "ResourceInUseException")
    release = NodeRelease(world.api, "trainer")  # type: ignore[arg-type]
    calls = refusal.left
    for _ in range(10):
        assert release.advance().startswith(f"node group {POOL}: 2 -> 0 nodes")
    assert calls - refusal.left == 1
    refusal.end()
    world.clock.now += LOOK_SECONDS
    give_back(world, "trainer")
    assert (cloud.size, world.held) == (0, {})


def test_an_eks_that_does_not_answer_at_the_end_leaves_the_nodes_to_the_reaper(
    world: World, cloud: Cloud, reconcile: Reconcile, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals = refuse_the_lowering(world, 503, "ServerException")
    began = world.clock.now
    assert reconcile().exit_code == 0
    assert RELEASE_SECONDS < world.clock.now - began < RELEASE_SECONDS + 120
    assert "the nodes are left to the reaper" in capsys.readouterr().out
    assert (cloud.size, world.held) == (2, {"trainer": 2})
    refusals[0].end()
    complete_job(world)
    reap(world, 2 * ORPHAN_SECONDS)
    assert cloud.size == 0
    assert world.is_down


def test_a_budget_that_denies_the_lowering_leaves_the_nodes_to_the_reaper_at_once(
    world: World, cloud: Cloud, reconcile: Reconcile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget's action takes the right from the deploy Job while a stage runs; the reaper keeps it."""
    refusals = refuse_the_lowering(world, 403, "AccessDeniedException")
    began = world.clock.now
    assert reconcile().exit_code == 0
    assert world.clock.now - began < 120
    said = capsys.readouterr().out
    assert f"IAM policy millrace-{REGION}-over-budget" in said
    assert "The nodes are left to the reaper" in said
    assert said.count("--nodegroup-name trainium --scaling-config desiredSize=0") == 1
    assert (cloud.size, world.held) == (2, {"trainer": 2})
    refusals[0].end()
    complete_job(world)
    reap(world, 2 * ORPHAN_SECONDS)
    assert cloud.size == 0
    assert world.is_down
