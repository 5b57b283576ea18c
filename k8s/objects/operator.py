"""The KubeRay operator that has the RayCluster, as far as what it makes shows its settings."""

from __future__ import annotations

from k8s.objects.api import Api, Object
from k8s.objects.names import CLUSTER
from k8s.objects.placement import heads_of

DEFAULT_SCHEDULER = "default-scheduler"  # what the API server writes into a pod that names none
POD_GROUP = f"ray-{CLUSTER}-pg"
"""The PodGroup that an operator with Volcano's integration makes for the whole RayCluster."""


def explain_batch_scheduler(api: Api, head_pod: Object) -> str:
    """Why an operator with a batch scheduler of its own cannot have this cluster; empty where it has none.

    With the integration of Volcano it makes a PodGroup for the RayCluster, and with each of them (Volcano, YuniKorn,
    KAI, scheduler-plugins) it writes another scheduler into the head's pod than the manifests' `head_pod` has.
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
        f"Initializing for ever. Start it without (Helm: batchScheduler.name unset), or let it watch other namespaces "
        f"and a second one {api.namespace} (docs/operations/existing-cluster.md), then: make cluster-down cluster-up"
    )
