"""Nodes that exist in the API alone: pods on them become Ready without a container (KWOK)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.shapes import find_shape
from tests.cluster.kit.processes import BIN, HOME, KUBECONFIG, PID, kubectl, run, start


def fake(count: int, first: int = 0) -> None:
    """Nodes trn1-<first> and on that exist only in the API: pods on them become Ready without a container.

    As large as trn1.32xlarge, tainted like real Trainium nodes, so that only pods that tolerate it come here.
    """
    if not (PID / "kwok").exists():
        start("kwok", BIN / "kwok", f"--kubeconfig={KUBECONFIG}", "--manage-nodes-with-label-selector=type=kwok",
              "--node-lease-duration-seconds=40", f"--config={module_stages()}")  # fmt: skip
    nodes = [fake_node(name) for name in fake_names(count, first)]
    kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes}))


def remove_fake(count: int, first: int = 0) -> None:
    """Take these nodes away, as when machines are lost: their pods are deleted within a minute."""
    kubectl("delete", "node", "--ignore-not-found", *fake_names(count, first))


def silence(*names: str) -> None:
    """Let these nodes die behind the API's back: nobody renews their leases or ends their pods any more.

    After 50 s they are NotReady and tainted as unreachable; after 300 s more their pods are deleted, in the API alone.
    """
    kubectl("label", "node", *names, "type-")


def fake_names(count: int, first: int) -> list[str]:
    return [f"trn1-{number}" for number in range(first, first + count)]


def fake_node(name: str) -> dict[str, Any]:
    labels = {"type": "kwok", "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": "local-a"}
    labels |= {"node.kubernetes.io/instance-type": "trn1.32xlarge", "millrace.dev/pool": "trainium"}
    shape = find_shape("trn1.32xlarge")
    resources = {
        "cpu": f"{shape.vcpus}",
        "memory": f"{shape.memory_gib}Gi",
        "ephemeral-storage": "1000Gi",
        "pods": "110",
        "hugepages-2Mi": f"{shape.huge_pages_gib}Gi",
        "aws.amazon.com/neuron": f"{shape.neuron_devices}",
        "vpc.amazonaws.com/efa": f"{shape.efa_cards}",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": labels},
        "spec": {"taints": [{"key": "aws.amazon.com/neuron", "value": "true", "effect": "NoSchedule"}]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def module_stages() -> Path:
    module = Path(json.loads(run("go", "mod", "download", "-json", "sigs.k8s.io/kwok@v0.8.0"))["Dir"])
    folders = ("pod/fast", "node/fast", "node/heartbeat-with-lease")
    files = [f for folder in folders for f in sorted((module / "kustomize/stage" / folder).glob("*.yaml"))]
    path = HOME / "kwok-stages.yaml"
    path.write_text("\n---\n".join(f.read_text() for f in files if f.name != "kustomization.yaml"))
    return path
