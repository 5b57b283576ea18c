"""Into a cluster with a KubeRay, a Volcano and people of its own, as docs/operations/existing-cluster.md says."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from images.platforms import REPOSITORY
from infra.account.session import STACK_TAG
from infra.workloads import kubernetes_cluster
from k8s.objects.api import Api, Object
from k8s.objects.operator import POD_GROUP
from services.common.testing.waiting import wait_until
from tests.cluster.harness import Harness, load_images, make_site
from tests.cluster.kit import cluster, fake_nodes
from tests.command import call

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAMESPACE = "research"
BATCH_SCHEDULER = "-batch-scheduler=volcano"
OURS = "kuberay-millrace"


@pytest.fixture(scope="module")
def harness(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head", "tokenizer")
    fake_nodes.fake(2)
    cluster.kubectl("label", "node", "node-a", "millrace.dev/pool=cpu")
    yield make_site(kit, tmp_path_factory.mktemp("existing"), REPOSITORY / "tests/cluster/overlays/existing")
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
        is_theirs = kind not in ("Namespace", "Queue", "PriorityClass", "PersistentVolume")
        where = {"namespace": NAMESPACE} if is_theirs else {}
        return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **where}, **parts}

    size = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    yield thing("v1", "Namespace", NAMESPACE)
    yield thing("scheduling.volcano.sh/v1beta1", "Queue", NAMESPACE, spec={"capability": {"cpu": "8"}, "weight": 1})
    yield thing("scheduling.k8s.io/v1", "PriorityClass", NAMESPACE, value=1)
    yield thing(
        "v1",
        "PersistentVolume",
        NAMESPACE,
        spec={**size, "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/tmp", "type": "Directory"}},
    )
    claim = {**size, "volumeName": NAMESPACE, "resources": {"requests": {"storage": "1Gi"}}}
    yield thing("v1", "PersistentVolumeClaim", "notes", spec=claim)
    yield thing("v1", "Service", "notebook", spec={"ports": [{"port": 80}], "type": "LoadBalancer"})
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


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """EKS of a simulated AWS, whose cluster millrace is this one, with a node group of the stack and one of theirs."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
    ):
        monkeypatch.setenv(name, value)
    eks = boto3.client("eks", region_name="us-west-2")
    role = "arn:aws:iam::123456789012:role/nodes"
    eks.create_cluster(name="millrace", roleArn=role, resourcesVpcConfig={"subnetIds": ["subnet-1"]})
    for name, tags in (("trainium", {STACK_TAG: "millrace"}), (NAMESPACE, {})):
        size = {"minSize": 0, "maxSize": 4, "desiredSize": 2}
        eks.create_nodegroup(
            clusterName="millrace",
            nodegroupName=name,
            nodeRole=role,
            subnets=["subnet-1"],
            scalingConfig=size,
            tags=tags,
        )
    monkeypatch.setattr(kubernetes_cluster, "find_endpoint", lambda account, name: f"https://{cluster.ADDRESS}:6443")
    yield eks
    server.stop()


@pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform on PATH")
def test_infra_down_takes_down_what_millrace_made_and_they_notice_nothing(
    harness: Harness,
    theirs: list[Object],
    account: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The team keeps its cluster, load balancer, claim and nodes."""
    variables = tmp_path / "mine.tfvars"
    variables.write_text('region = "us-west-2"\nzone_id = "usw2-az4"\n', encoding="utf-8")
    path = f"{cluster.BIN}{os.pathsep}{os.environ['PATH']}"
    for name, value in (
        ("VARS", str(variables)),
        ("YES", "1"),
        ("OVERLAY", str(harness.overlay)),
        ("KUBECONFIG", str(cluster.KUBECONFIG)),
        ("PATH", path),
    ):
        monkeypatch.setenv(name, value)
    harness.succeed("cluster-up")
    before = seen(harness.api, theirs)

    refused = call(capfd, "infra.__main__", "down")

    assert refused.returncode == 4, refused.stderr
    for each in (f"namespace  {NAMESPACE}", f"service  {NAMESPACE}/notebook", f"node group  {NAMESPACE}"):
        assert each in re.sub(r"  +", "  ", refused.stderr)
    assert harness.api.find("RayCluster", "millrace") is not None

    monkeypatch.setenv("KEEP_CLUSTER", "true")
    done_down = call(capfd, "infra.__main__", "down")

    assert done_down.returncode == 0, done_down.stderr
    assert seen(harness.api, theirs) == before
    for name in ("millrace", "millrace-setup"):
        assert harness.api.find("Namespace", name) is None
    groups = [
        account.describe_nodegroup(clusterName="millrace", nodegroupName=name)["nodegroup"]
        for name in ("trainium", NAMESPACE)
    ]
    assert [group["scalingConfig"]["desiredSize"] for group in groups] == [0, 2]
