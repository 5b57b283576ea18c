"""A node pool is described before a deployment, and checked before it is scaled up: cost, reservation, every misfit."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from deploy.client.instance_type import check_instance_type
from k8s.client.deployment_plan import describe_plan
from k8s.controller.node_pool import NodePool, check_pool
from k8s.objects.names import (
    CAPACITY_END,
    NODE_POOL,
    NODE_PRICE,
    REGION_ANNOTATION,
    stage_annotation,
)
from k8s.objects.node_group import EksNodeGroup
from k8s.objects.worker_group import WorkerGroup, worker_group_of
from tests.k8s.builders import REGION, deployment_of, outline_of
from tests.k8s.cloud import POOL, Cloud
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, cluster_of

SELECTED = {"node.kubernetes.io/instance-type": "trn1.32xlarge", "millrace.dev/pool": "trainium"}
TAINT = {"key": "aws.amazon.com/neuron", "value": "true", "effect": "NoSchedule"}
SEEN_LABELS = {"millrace.dev/pool": "trainium", "millrace.dev/shape": "trn1.32xlarge"}
# As EKS describes a group that fits.
SEEN: dict[str, Any] = {
    "name": POOL,
    "status": "ACTIVE",
    "desired_size": 0,
    "min_size": 0,
    "max_size": 4,
    "instance_types": [],  # its launch template says them
    "labels": SEEN_LABELS,
    "taints": [TAINT],
    "subnets": ["subnet-1"],
    "issues": [],
}


pytestmark = pytest.mark.usefixtures("account")


@pytest.fixture
def trainer(overlays: dict[str, list[Thing]]) -> WorkerGroup:
    return with_annotations(overlays)


def with_annotations(overlays: dict[str, list[Thing]], **changes: str) -> WorkerGroup:
    """The trainer's worker group of the overlay eks, with a pool."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    cluster["metadata"]["annotations"][REGION_ANNOTATION] = REGION
    template = cluster["spec"]["workerGroupSpecs"][2]["template"]
    wanted = {"pool": POOL, "price": "21.50", "end": ""} | changes
    cluster["metadata"]["annotations"] |= {
        stage_annotation("trainer", NODE_POOL): wanted["pool"],
        stage_annotation("trainer", NODE_PRICE): wanted["price"],
        stage_annotation("trainer", CAPACITY_END): wanted["end"],
    }
    template["spec"]["nodeSelector"] = SELECTED
    return worker_group_of(cluster, "trainer")


OTHER_SHAPE = SEEN_LABELS | {"millrace.dev/shape": "trn1n.32xlarge"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"status": "UPDATING"}, None),
        ({"status": "DEGRADED", "issues": ["AsgInstanceLaunchFailures: none left"]}, None),
        ({"instance_types": ["trn1.32xlarge"]}, None),
        ({"labels": {"millrace.dev/pool": "trainium"}}, None),
        ({"status": "DELETING"}, "DELETING"),
        ({"status": "CREATE_FAILED", "issues": ["NodeCreationFailure: x"]}, "NodeCreationFailure: x"),
        ({"instance_types": ["trn1.2xlarge"]}, "trn1.2xlarge"),
        ({"labels": OTHER_SHAPE}, "trn1n.32xlarge"),
        ({"labels": {}}, "millrace.dev/pool=trainium"),
        ({"taints": [TAINT | {"key": "other"}]}, "other:NoSchedule"),
        ({"subnets": ["subnet-1", "subnet-2"]}, "subnet-1, subnet-2"),
    ],
)
def test_a_pool_that_does_not_fit_is_named(trainer: WorkerGroup, changes: dict[str, Any], named: str | None) -> None:
    found = check_pool(trainer, EksNodeGroup(**SEEN | changes))
    assert bool(found) == (named is not None), found
    assert named is None or named in found


TYPE = "cluster.trainer_instance_type"


@pytest.mark.parametrize(
    ("stage", "overrides", "named"),
    [
        ("trainer", {TYPE: "trn1.32xlarge"}, ""),
        ("trainer", {TYPE: "trn1n.32xlarge"}, "trn1n.32xlarge"),
        ("trainer", {"cluster.trainer_workers_per_node": "64"}, "trainer_workers_per_node is 64"),
        ("compiler", {TYPE: "trn2.48xlarge"}, ""),
        ("tokenizer", {TYPE: "trn2.48xlarge"}, ""),
    ],
)
def test_a_recipe_for_other_nodes_is_named(
    compiler_on_cpus: list[Thing], stage: str, overrides: dict[str, str], named: str
) -> None:
    """The compiler's CPU nodes compile for whatever the recipe says and its image, which is asked later, accepts."""
    group = worker_group_of(cluster_of(compiler_on_cpus), stage)
    found = check_instance_type(stage, outline_of(**overrides), group.instance_type, "CHANGE")
    assert (named in found, bool(found)) == (True, bool(named))


@pytest.mark.parametrize(("pool", "said"), [("millrace/trn2", "CLUSTER_NAME"), ("other/trainium", "other")])
def test_a_pool_that_eks_does_not_have_ends_a_deployment(trainer: WorkerGroup, pool: str, said: str) -> None:
    """tests/k8s/test_node_pools.py has what EKS refuses, and that nothing is scaled then."""
    Cloud()
    api: Any = MemoryApi()
    assert said in NodePool(api, "trainer", pool, print).observe(2, trainer).refusal


def test_hours_times_price_come_first(overlays: dict[str, list[Thing]]) -> None:
    end = datetime.now(UTC) + timedelta(hours=2)
    group = with_annotations(overlays, end=f"{end:%Y-%m-%dT%H:%M:%SZ}")
    limited, unlimited = outline_of(**{"train.time_limit_seconds": "7200"}), outline_of()
    cost, nodes, capacity = describe_plan(group, deployment_of(nodes=4), limited).split("\n")[:3]
    assert ("$86.00" in cost, "$172.00" in cost) == (True, True)
    assert "millrace/trainium: 4 nodes" in nodes
    assert "1.3 h from now" in capacity
    for hours, outline, has_attempt in ((1, limited, False), (3, limited, True), (3, unlimited, False)):
        cost = describe_plan(group, deployment_of(limit_seconds=hours * 3_600), outline).split("\n")[0]
        assert ("$86.00" in cost, f"${43 * hours:,}.00 at most" in cost) == (has_attempt, True)
    cost = describe_plan(group, deployment_of(), unlimited).split("\n")[0]
    assert ("$43.00" in cost, "at most" in cost) == (True, False)
