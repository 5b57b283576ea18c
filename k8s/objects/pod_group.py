"""The PodGroup with which Volcano places a stage's pods: all of them or none."""

from __future__ import annotations

from decimal import ROUND_UP, Decimal

from k8s.objects.api import Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import KEEP_ANNOTATION, PLACED_FOR_ANNOTATION, STAGE_LABEL
from k8s.objects.worker_group import Stage


def pod_group(stage: Stage, deployment: Deployment, attempt: int, nodes: int) -> Object:
    """All N pods or none. Made with a deployment and deleted after it: an empty one holds room in its queue."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": stage.pod_group,
            "labels": {STAGE_LABEL: stage.name},
            "annotations": {
                PLACED_FOR_ANNOTATION: deployment.rayjob(attempt),
                KEEP_ANNOTATION: "1" if deployment.keep else "0",
            },
        },
        "spec": {
            "minMember": nodes,
            "queue": stage.queue,
            "priorityClassName": stage.pod["priorityClassName"],
            "minResources": {name: _amount(each * nodes) for name, each in stage.requests.items()},
        },
    }


def _amount(number: Decimal) -> str:
    """A quantity as the API takes it: whole numbers plainly, fractions in thousandths."""
    return str(int(number)) if number == int(number) else f"{int((number * 1000).to_integral_value(ROUND_UP))}m"


def placed_size(group: Object | None, deployment: Deployment, attempt: int) -> int:
    """Nodes that the attempt is placed on: all, but where its PodGroup has been given fewer."""
    placed_for = ((group or {}).get("metadata", {}).get("annotations") or {}).get(PLACED_FOR_ANNOTATION)
    if group and placed_for == deployment.rayjob(attempt):
        return int(group["spec"]["minMember"])
    return deployment.nodes
