"""Deployments tell their operators what happens, and send the notices of their pods, which reach nobody themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k8s.controller.notices import NO_CAPACITY_SECONDS
from k8s.controller.ray_jobs import DriverState
from services.common.errors import RecipeError
from services.common.notices.stage_notices import StageNotices, notifying
from services.common.notices.variables import RELAY, RELAY_VARIABLE, WEBHOOK_VARIABLE
from services.common.recipe.schema import Notify
from services.common.testing.webhooks import SECRET, Receiver, receiving
from tests.k8s.builders import READY, Clock
from tests.k8s.rendered import Thing
from tests.k8s.world import DARK, LOST, Reconcile, World, ended


@pytest.fixture
def make_world(eks_cluster: Thing, clock: Clock) -> Callable[[], World]:
    return lambda: World(eks_cluster, clock, nodes=2)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as opened:
        monkeypatch.setenv(WEBHOOK_VARIABLE, opened.url)
        yield opened


def conditions_of(receiver: Receiver) -> list[str]:
    return [json.loads(key).split("/")[1] for key in receiver.keys]


def test_a_deployment_tells_of_its_begin_a_lost_driver_and_its_end(
    world: World, reconcile: Reconcile, receiver: Receiver, tmp_path: Path
) -> None:
    """A lost driver says nothing itself."""
    world.attempt = lambda number: LOST if number == 1 else ended(0)

    assert reconcile(retries=3).exit_code == 0

    assert conditions_of(receiver) == ["started", "ended", "done"]
    assert "attempt 1 ended with exit code 75" in receiver.bodies[1]["text"]
    assert all("make stage-status" in body["text"] for body in receiver.bodies)
    assert SECRET not in "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))


def test_a_deployment_whose_nodes_do_not_come_tells_so_once_before_it_gives_up(
    world: World, reconcile: Reconcile, receiver: Receiver
) -> None:
    for name in world.api.names("Node"):
        world.set_node(name, *DARK)

    assert reconcile(start_timeout_seconds=3 * int(NO_CAPACITY_SECONDS)).exit_code == 75

    assert conditions_of(receiver) == ["no_capacity", "ended"]
    assert "runbooks/no-capacity.md" in receiver.bodies[0]["text"]
    assert "make deploy-stage STAGE=trainer" in receiver.bodies[1]["text"]


def test_a_node_that_is_lost_in_a_run_is_named(world: World, reconcile: Reconcile, receiver: Receiver) -> None:
    def attempt(number: int) -> DriverState:
        if number == 1:
            [lost, *_] = world.bound()
            world.set_node(lost, *DARK)
            world.set_node("spare", [], [READY])
            return LOST
        return ended(0)

    world.attempt = attempt
    assert reconcile(retries=3).exit_code == 0

    assert conditions_of(receiver).count("node_set_aside") == 1
    [text] = [body["text"] for body in receiver.bodies if "set aside" in body["text"]]
    assert "node n0 is unreachable" in text


def test_what_a_stage_tells_is_sent_by_its_deploy_job(
    world: World, reconcile: Reconcile, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own word on its end is left to the deploy Job, so that nobody reads it twice."""

    def attempt(number: int) -> DriverState:
        with monkeypatch.context() as pod:
            pod.setenv(RELAY_VARIABLE, RELAY)
            notices = StageNotices(
                tmp_path / "run/small-0123abcd/notices.jsonl",
                Notify(),
                subject="trainer small-0123abcd",
                root=tmp_path,
                next_command="again",
            )
            notices.raise_notice("loss_diverged", "9", "the run diverged at step 9")
            with pytest.raises(RecipeError), notifying(notices):
                raise RecipeError("diverged")
        return ended(2, "millrace: diverged")

    world.attempt = attempt
    assert reconcile(retries=3).exit_code == 2

    assert sorted(conditions_of(receiver)) == ["ended", "loss_diverged", "started"]
