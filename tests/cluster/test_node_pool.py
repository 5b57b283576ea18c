"""Nodes that come with a deployment and go after it: the deploy Jobs ask an EKS of moto's, and fake trn1 nodes are what
it has. The Jobs, their pods' deaths, the operator and Volcano are real.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from images.platforms import REPOSITORY
from k8s.objects.api import Api
from k8s.objects.node_group import NODE_GROUP_LABEL, find_holder, read_leases
from services.common.testing.waiting import wait_until
from tests.cluster.harness import Harness, load_images, running_harness
from tests.cluster.kit import cluster, fake_nodes
from tests.cluster.test_gangs import MINUTE, abandon, cluster_log, deploy, deploy_pod, reap, status
from tests.k8s.cloud import POOL, SIZES, make_node_group

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PORT = 5566  # tests/cluster/overlays/pool names it


class NodeGroup:
    """A managed node group of moto's, whose nodes are fake ones that come and go with its size."""

    def __init__(self, client: Any) -> None:
        self._client = client
        make_node_group(client)
        self.has_capacity = threading.Event()
        self.has_capacity.set()
        self._is_over = threading.Event()
        self._nodes = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def size(self) -> int:
        group = self._client.describe_nodegroup(clusterName="millrace", nodegroupName="trainium")["nodegroup"]
        return int(group["scalingConfig"]["desiredSize"])

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        fake_nodes.remove_fake(SIZES["maxSize"])

    def _serve(self) -> None:
        while not self._is_over.wait(0.5):
            size = self.size
            if size > self._nodes and self.has_capacity.is_set():
                fake_nodes.fake(size - self._nodes, first=self._nodes)
                names = fake_nodes.fake_names(size - self._nodes, self._nodes)
                labels = (f"{NODE_GROUP_LABEL}=trainium", "millrace.dev/pool=trainium")
                cluster.kubectl("label", "node", "--overwrite", *names, *labels)
                self._nodes = size
            elif size < self._nodes:
                fake_nodes.remove_fake(self._nodes - size, first=size)
                self._nodes = size


@pytest.fixture(scope="module")
def node_group(kit: Api) -> Iterator[NodeGroup]:
    server = ThreadedMotoServer(ip_address=cluster.ADDRESS, port=PORT, verbose=False)
    server.start()
    client = boto3.client(
        "eks",
        region_name="us-west-2",
        endpoint_url=f"http://{cluster.ADDRESS}:{PORT}",
        aws_access_key_id="nobody",
        aws_secret_access_key="nothing",
    )
    made = NodeGroup(client)
    yield made
    made.end()
    server.stop()


@pytest.fixture(scope="module")
def harness(kit: Api, node_group: NodeGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head")
    with running_harness(kit, tmp_path_factory.mktemp("pool"), REPOSITORY / "tests/cluster/overlays/pool") as made:
        yield replace(made, recipe=REPOSITORY / "recipes/tiny-cpu.toml")


@pytest.fixture(autouse=True)
def nothing_deployed(harness: Harness) -> Iterator[None]:
    yield
    harness.stop("compiler")


def is_given_back(harness: Harness, node_group: NodeGroup) -> bool:
    """The group is as it was, and nobody holds a node of it."""
    return node_group.size == 0 and not read_leases(harness.api) and not has_nodes(harness)


def has_nodes(harness: Harness) -> bool:
    return bool(harness.api.find_all("Node", f"{NODE_GROUP_LABEL}=trainium"))


def test_a_deployment_raises_the_group_from_zero_and_lowers_it_again(harness: Harness, node_group: NodeGroup) -> None:
    assert is_given_back(harness, node_group)
    said = deploy(harness, nodes=2)
    assert "cost        2 x trn1.32xlarge x $21.50 = $43.00 an hour" in said
    wait_until(lambda: len(harness.ready("compiler")) == 2, 2 * MINUTE)
    assert node_group.size == 2
    assert find_holder(harness.api, POOL) == "compiler"
    assert POOL in status(harness)
    assert f"node group {POOL}: 0 -> 2 nodes" in cluster_log(harness, "compiler")
    harness.stop("compiler")
    wait_until(lambda: is_given_back(harness, node_group), MINUTE)


def test_a_deploy_job_whose_pod_is_killed_gives_back_what_it_raised(harness: Harness, node_group: NodeGroup) -> None:
    """First while its nodes start, then while its gang stands."""
    node_group.has_capacity.clear()
    deploy(harness, nodes=2)
    wait_until(lambda: node_group.size == 2, 2 * MINUTE)
    kill_deploy_pod(harness)
    wait_until(lambda: f"0 of 2 nodes of node group {POOL} are ready" in cluster_log(harness, "compiler"), 3 * MINUTE)
    node_group.has_capacity.set()
    wait_until(lambda: len(harness.ready("compiler")) == 2, 2 * MINUTE)
    uids = {pod["metadata"]["uid"] for pod in harness.pods("compiler")}
    kill_deploy_pod(harness)
    assert (node_group.size, {pod["metadata"]["uid"] for pod in harness.pods("compiler")}) == (2, uids)
    harness.stop("compiler")
    assert harness.record("compiler").attempts == ()
    wait_until(lambda: is_given_back(harness, node_group), MINUTE)


def kill_deploy_pod(harness: Harness) -> None:
    """Kill the deploy Job's pod without notice; another takes its place."""
    wait_until(lambda: deploy_pod(harness), 3 * MINUTE)
    killed = deploy_pod(harness)
    cluster.kubectl("-n", "millrace", "delete", "pod", killed, "--grace-period=0", "--force")
    wait_until(lambda: deploy_pod(harness) not in ("", killed), 3 * MINUTE)


def test_nodes_that_nobody_holds_any_more_go(harness: Harness, node_group: NodeGroup) -> None:
    deploy(harness, nodes=2)
    wait_until(lambda: len(harness.ready("compiler")) == 2, 2 * MINUTE)
    abandon(harness)
    reap()
    wait_until(lambda: is_given_back(harness, node_group), MINUTE)
