"""The PodGroup with which Volcano places a stage's gang: all of its pods or none."""

from __future__ import annotations

from decimal import ROUND_UP, Decimal

from k8s.objects.api import Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import KEEP_ANNOTATION, PLACED_FOR_ANNOTATION, STAGE_LABEL
from k8s.objects.worker_group import WorkerGroup


def render_pod_group(group: WorkerGroup, deployment: Deployment, attempt: int, nodes: int) -> Object:
    """The PodGroup of one attempt. It lives no longer than the deployment: an empty one holds room in its queue."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": group.pod_group,
            "labels": {STAGE_LABEL: group.name},
            "annotations": {
                PLACED_FOR_ANNOTATION: deployment.rayjob_name(attempt),
                KEEP_ANNOTATION: "1" if deployment.keep else "0",
            },
        },
        "spec": {
            "minMember": nodes,
            "queue": group.queue,
            "priorityClassName": group.pod["priorityClassName"],
            "minResources": {name: _amount(each * nodes) for name, each in group.requests.items()},
        },
    }


def _amount(number: Decimal) -> str:
    """A Kubernetes quantity: whole numbers as they are, fractions in thousandths."""
    return str(int(number)) if number == int(number) else f"{int((number * 1000).to_integral_value(ROUND_UP))}m"


def placed_size(group: Object | None, deployment: Deployment, attempt: int) -> int:
    """Number of nodes of the attempt: all of the deployment's unless the attempt's PodGroup was shrunk."""
    placed_for = ((group or {}).get("metadata", {}).get("annotations") or {}).get(PLACED_FOR_ANNOTATION)
    if group and placed_for == deployment.rayjob_name(attempt):
        return int(group["spec"]["minMember"])
    return deployment.nodes
