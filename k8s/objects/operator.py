"""Recognizes a KubeRay operator whose settings do not fit, by the objects that it makes."""

from __future__ import annotations

from k8s.objects.api import Api, Object
from k8s.objects.names import CLUSTER
from k8s.objects.placement import heads_of

DEFAULT_SCHEDULER = "default-scheduler"  # the API server writes it into a pod that names none
POD_GROUP = f"ray-{CLUSTER}-pg"
"""The PodGroup that an operator with Volcano's integration makes for the whole RayCluster."""


def explain_batch_scheduler(api: Api, head_pod: Object) -> str:
    """Explain that the operator has a batch scheduler of its own; empty where it has none.

    With the integration of Volcano the operator makes a PodGroup for the RayCluster. With every integration (Volcano,
    YuniKorn, KAI, scheduler-plugins) it gives the head another scheduler than `head_pod` of the manifests has.
    """
    wanted = head_pod.get("schedulerName") or DEFAULT_SCHEDULER
    given = sorted({pod["spec"].get("schedulerName") or DEFAULT_SCHEDULER for pod in heads_of(api)} - {wanted})
    if given:
        sign = f"it gave the head to the scheduler {given[0]}"
    elif api.find("PodGroup", POD_GROUP):
        sign = f"it made PodGroup {POD_GROUP}"
    else:
        return ""
    return (
        f"the KubeRay operator runs with its own batch scheduler ({sign}): a RayJob on this cluster would stay "
        f"Initializing for ever. Start the operator without one (Helm: batchScheduler.name unset), or let it watch "
        f"other namespaces and run a second operator for {api.namespace} (docs/operations/existing-cluster.md), then: "
        f"make cluster-down cluster-up"
    )
