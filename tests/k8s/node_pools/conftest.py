"""A trainer's world in memory whose nodes come from a node group of moto's."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.controller import reconciler
from k8s.controller.reconciler import Reconciler
from k8s.objects.names import node_pool_annotation
from k8s.objects.record import Outcome
from tests.k8s.builders import Clock
from tests.k8s.cloud import POOL, Cloud
from tests.k8s.rendered import Thing, cluster_of
from tests.k8s.world import NoLog, World, cluster_group


@pytest.fixture
def make_world(
    overlays: dict[str, list[Thing]], tmp_path: Path, clock: Clock, account: None
) -> Iterator[Callable[[], World]]:
    """Makes worlds without nodes, whose trainer has a node pool."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    template = cluster_group(cluster)["template"]
    cluster["metadata"]["annotations"][node_pool_annotation("trainer")] = POOL
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    next(each for each in mounts if each["name"] == "fsx")["mountPath"] = str(tmp_path)
    before, began = signal.getsignal(signal.SIGTERM), clock.now

    def make() -> World:
        clock.now = began
        return World(cluster, clock, nodes=0)

    yield make
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def world(make_world: Callable[[], World]) -> World:
    return make_world()


@pytest.fixture
def cloud(world: World) -> Cloud:
    made = Cloud()
    world.watch = lambda: made.serve(world)
    return made


@pytest.fixture
def reconcile(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a deployment to its end."""
    monkeypatch.setattr(reconciler, "RayJobs", lambda cluster, namespace: world)
    monkeypatch.setattr(reconciler, "DriverLog", NoLog)
    monkeypatch.setattr(Reconciler, "_pause", lambda self: world.pass_time())

    def run(**changes: Any) -> Outcome:
        outcome = Reconciler(world.api, world.deploy(node_pool=POOL, **changes), "pod").run()  # type: ignore[arg-type]
        assert outcome
        world.pass_time()
        return outcome

    return run
