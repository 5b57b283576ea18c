"""The cluster that all tests of this folder run on is a real one: it schedules gangs, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.errors import DeviceError
from services.common.tests.builders import wait_until
from tests.cluster.kit import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def kit() -> Iterator[None]:
    try:
        cluster.require_prerequisites()
    except DeviceError as error:
        pytest.skip(str(error))
    cluster.up()
    yield
    cluster.down()


def get(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(cluster.kubectl("get", *arguments, "-o", "json")))


def apply(*objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def gang(name: str, size: int) -> list[dict[str, Any]]:
    """A Volcano PodGroup and its pods, each of which takes a whole trn1 node."""
    group = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"minMember": size, "queue": "default"},
    }
    devices = {"aws.amazon.com/neuron": "16"}
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-{n}", "annotations": {"scheduling.k8s.io/group-name": name}},
            "spec": {
                "schedulerName": "volcano",
                "nodeSelector": {"type": "kwok"},
                "tolerations": [{"key": "aws.amazon.com/neuron", "operator": "Exists"}],
                "containers": [
                    {"name": "work", "image": "any", "resources": {"requests": devices, "limits": devices}},
                ],
            },
        }
        for n in range(size)
    ]
    return [group, *pods]


def bound(name: str) -> int:
    pods = get("pods")["items"]
    return sum("nodeName" in pod["spec"] for pod in pods if pod["metadata"]["name"].startswith(f"{name}-"))


def conditions(name: str) -> str:
    """What Volcano says of the group; nothing until it has looked at it."""
    return " ".join(each["message"] for each in get("podgroup", name).get("status", {}).get("conditions", []))


def test_the_node_has_neuron_devices_and_the_operators_their_types() -> None:
    capacity = get("node", "node-a")["status"]["capacity"]
    assert (capacity["aws.amazon.com/neuron"], capacity["vpc.amazonaws.com/efa"]) == ("64", "32")
    types = {each["metadata"]["name"] for each in get("crd")["items"]}
    assert {"rayclusters.ray.io", "rayjobs.ray.io", "podgroups.scheduling.volcano.sh"} <= types


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    cluster.fake(1)
    apply(*gang("pair", 2))
    wait_until(
        lambda: "Insufficient aws.amazon.com/neuron" in conditions("pair") or "unschedulable" in conditions("pair")
    )
    assert bound("pair") == 0
    cluster.fake(2)
    wait_until(lambda: bound("pair") == 2)


def test_up_again_changes_nothing() -> None:
    before = get("node", "node-a")["metadata"]["uid"]
    cluster.up()
    assert get("node", "node-a")["metadata"]["uid"] == before


def test_down_leaves_no_process_no_mount_and_no_bridge() -> None:
    cluster.up()
    cluster.down()
    mine = str(cluster.HOME)
    alive = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if any(mine in a for a in p.info["cmdline"] or [])]
    assert alive == []
    assert mine not in Path("/proc/mounts").read_text(encoding="utf-8")
    assert not Path("/sys/class/net/mrcontrol0").exists()
    assert not cluster.KUBECONFIG.exists()
