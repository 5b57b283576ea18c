"""Fixtures that tests share: the rendered overlays, an AWS account, and a clock to move."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.client.overlay import find_kubectl, render
from k8s.controller import reconciler
from k8s.controller.reconciler import Reconciler
from k8s.objects import node_group
from k8s.objects.record import Outcome
from services.common.errors import DeviceError
from tests.k8s.builders import REGION, Clock
from tests.k8s.cloud import Cloud
from tests.k8s.rendered import OVERLAYS, Thing, cluster_of, copy_overlay, groups_of
from tests.k8s.world import NoLog, Reconcile, World


@pytest.fixture(scope="session")
def overlays() -> dict[str, list[Thing]]:
    try:
        find_kubectl()
    except DeviceError as error:
        pytest.skip(str(error))
    return {name: render(folder) for name, folder in OVERLAYS.items()}


@pytest.fixture(scope="session")
def compiler_on_cpus(overlays: dict[str, list[Thing]], tmp_path_factory: pytest.TempPathFactory) -> list[Thing]:
    """The overlay eks of a cluster whose compiler traces without a device."""
    return render(copy_overlay(OVERLAYS["eks"], tmp_path_factory.mktemp("on-cpus"), COMPILER_POOL="cpu"))


@pytest.fixture(scope="module")
def account() -> Iterator[None]:
    """An AWS account of moto's. A module shares one client, because botocore takes 0.3 s to make it."""
    from moto import mock_aws  # noqa: PLC0415 - the import takes long, and few test files need it

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("AWS_REGION", REGION)
        node_group._connect.cache_clear()
        yield
    node_group._connect.cache_clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", lambda: made.now)
    return made


@pytest.fixture
def eks_cluster(overlays: dict[str, list[Thing]], tmp_path: Path) -> Iterator[Thing]:
    """The RayCluster of the overlay eks, with `tmp_path` as its trainer's root."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    mounts = groups_of([cluster])["trainer"]["template"]["spec"]["containers"][0]["volumeMounts"]
    next(each for each in mounts if each["name"] == "fsx")["mountPath"] = str(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield cluster
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def world(make_world: Callable[[], World]) -> World:
    """The world of a test; each module or folder has its own `make_world`."""
    return make_world()


@pytest.fixture
def cloud(world: World) -> Cloud:
    made = Cloud()
    world.watch = lambda: made.serve(world)
    return made


@pytest.fixture
def reconcile(world: World, monkeypatch: pytest.MonkeyPatch) -> Reconcile:
    """Run a deployment to its end."""
    monkeypatch.setattr(reconciler, "RayJobs", lambda cluster, namespace: world)
    monkeypatch.setattr(reconciler, "DriverLog", NoLog)
    monkeypatch.setattr(Reconciler, "_pause", lambda self: world.pass_time())

    def run(**changes: Any) -> Outcome:
        outcome = Reconciler(world.api, world.deploy(**changes), "pod").run()
        assert outcome
        world.pass_time()
        return outcome

    return run
