"""Into a cluster with a KubeRay, a Volcano and people of its own, as docs/operations/existing-cluster.md says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from images.platforms import REPOSITORY
from k8s.objects.api import Api, Object
from k8s.objects.placement import POD_GROUP
from services.common.testing.waiting import wait_until
from tests.cluster.harness import Harness, load_images, make_harness
from tests.cluster.kit import cluster, fake_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAMESPACE = "research"
BATCH_SCHEDULER = "-batch-scheduler=volcano"
OURS = "kuberay-millrace"


@pytest.fixture(scope="module")
def harness(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head", "tokenizer")
    fake_nodes.fake(2)
    cluster.kubectl("label", "node", "node-a", "millrace.dev/pool=cpu")
    yield make_harness(kit, tmp_path_factory.mktemp("existing"), REPOSITORY / "tests/cluster/overlays/existing")
    cluster.kubectl("label", "node", "node-a", "millrace.dev/pool-")
    fake_nodes.remove_fake(2)


@pytest.fixture(scope="module")
def theirs(kit: Api) -> Iterator[list[Object]]:
    """The objects of another team, in its namespace and cluster-wide."""
    things = list(things_of_a_team())
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
    cluster.kubectl("apply", "-f", "-", input=objects)
    yield things
    cluster.kubectl("delete", "-f", "-", input=objects)


def things_of_a_team() -> Iterator[Object]:
    def thing(api: str, kind: str, name: str, **parts: Any) -> Object:
        is_theirs = kind not in ("Namespace", "Queue", "PriorityClass")
        where = {"namespace": NAMESPACE} if is_theirs else {}
        return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **where}, **parts}

    yield thing("v1", "Namespace", NAMESPACE)
    yield thing("scheduling.volcano.sh/v1beta1", "Queue", NAMESPACE, spec={"capability": {"cpu": "8"}, "weight": 1})
    yield thing("scheduling.k8s.io/v1", "PriorityClass", NAMESPACE, value=1)
    fake = {
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "aws.amazon.com/neuron", "operator": "Exists"}],
        "containers": [{"name": "ray", "image": "rayproject/ray:2.60.0"}],
    }
    yield thing(
        "ray.io/v1",
        "RayCluster",
        "theirs",
        spec={"rayVersion": "2.60.0", "headGroupSpec": {"rayStartParams": {}, "template": {"spec": fake}}},
    )


@contextmanager
def operators(*started: tuple[str, int, tuple[str, ...]]) -> Iterator[None]:
    """These in place of the kit's own operator, each with a name, its first port and its flags."""
    cluster.stop(cluster.KUBERAY)
    for name, first_port, flags in started:
        cluster.start_kuberay(*flags, name=name, first_port=first_port)
    try:
        yield
    finally:
        for name, _, _ in started:
            cluster.stop(name)
        cluster.start_kuberay()


def seen(api: Api, things: list[Object]) -> dict[str, tuple[str, Any]]:
    """The identity and spec of the team's objects; for its RayCluster also those of the head's pod."""
    names = [f"{each['kind']}/{each['metadata']['name']}" for each in things]
    found = json.loads(cluster.kubectl("-n", NAMESPACE, "get", *names, "-o", "json"))["items"]
    found += api.within(NAMESPACE).find_all("Pod", "ray.io/cluster=theirs")
    return {f"{each['kind']} {each['metadata']['name']}": (each["metadata"]["uid"], each.get("spec")) for each in found}


def take_down(harness: Harness) -> None:
    harness.succeed("cluster-down", FORCE="1")
    for name in ("millrace", "millrace-setup"):
        assert harness.api.find("Namespace", name) is None


def test_an_operator_with_a_batch_scheduler_is_named_and_refused(harness: Harness, theirs: list[Object]) -> None:
    """cluster-up refuses at once, and so does preflight if somebody deploys nevertheless."""
    with operators((cluster.KUBERAY, 18080, (BATCH_SCHEDULER,))):
        up = harness.run("cluster-up")
        deployed = harness.run("deploy-stage", STAGE="tokenizer")
        assert harness.api.find("PodGroup", POD_GROUP) is not None
        take_down(harness)
    for done in (up, deployed):
        assert done.code == 4
        assert "runs with its own batch scheduler" in done.said
        assert "docs/operations/existing-cluster.md" in done.said
        assert "Traceback" not in done.said


def test_beside_it_an_operator_of_our_own_runs_a_stage_and_theirs_notice_nothing(
    harness: Harness, theirs: list[Object]
) -> None:
    """Two operators watch a namespace each: theirs keeps gangs for their RayClusters, ours starts RayJobs."""
    api, of_theirs = harness.api, harness.api.within(NAMESPACE)
    with operators(
        (cluster.KUBERAY, 18080, (BATCH_SCHEDULER, f"-watch-namespace={NAMESPACE}")),
        (OURS, 18090, ("-watch-namespace=millrace",)),
    ):
        wait_until(lambda: of_theirs.find("PodGroup", "ray-theirs-pg") and len(of_theirs.find_all("Pod")) == 1, 60)
        before = seen(api, theirs)
        harness.succeed("cluster-up")
        assert api.find("PodGroup", POD_GROUP) is None
        harness.succeed("deploy-stage", STAGE="tokenizer")
        assert "published" in harness.log_of("tokenizer")
        assert harness.is_down("tokenizer")
        take_down(harness)
        assert seen(api, theirs) == before
        for name in ("millrace", "millrace-stage"):
            assert api.find("Queue", name) is None
            assert api.find("PriorityClass", name) is None
