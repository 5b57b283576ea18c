"""Derives the limits of a namespace from its RayCluster: the images that may run, and the resources of its pods.

Admission policies (`k8s/base/pod-admission.yaml`) read these limits from the namespace's annotations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal

from k8s.client.stage_image import full_name
from k8s.objects.api import Object
from k8s.objects.names import (
    EFA,
    IMAGES_ANNOTATION,
    NEURON,
    ONE_OFF_CPUS_ANNOTATION,
    ONE_OFF_MEMORY_ANNOTATION,
    ONE_OFF_POOL_ANNOTATION,
    POOL_LABEL,
)
from k8s.objects.one_off_job import CPU_STAGE
from k8s.objects.worker_group import quantity, worker_group_of
from services.common.recipe.schema import STAGES

MAX_HEADS = 2 + len(STAGES)
"""Largest number of head pods: the cluster's, its replacement, and one for each stage with a Ray cluster of its own."""
MAX_ONE_OFFS = 4
"""Largest number of concurrent one-offs, each as large as a pod of a CPU node."""
MAX_JOBS = "count/jobs.batch"
JOB_REQUESTS = {"cpu": Decimal("0.2"), "memory": Decimal(2**30)}  # at most: k8s/base/pod-admission.yaml
COUNTED = {"cpu": "requests.cpu", "memory": "requests.memory", NEURON: f"requests.{NEURON}", EFA: f"requests.{EFA}"}


def fill_images(namespace: Object, cluster: Object) -> None:
    """Annotate the namespace with the registries and folders of the RayCluster's images.

    An image without a registry has two names; nodes report the one with `docker.io`.
    """
    folders = {container["image"].rpartition("/")[0] + "/" for pod, _ in _pods(cluster) for container in pod}
    known = sorted(folders | {full_name(folder) for folder in folders})
    namespace["metadata"].setdefault("annotations", {}).setdefault(IMAGES_ANNOTATION, " ".join(known))


def fill_one_off(namespace: Object, cluster: Object) -> None:
    """Annotate the namespace with the node pool and the largest size of one-offs: those of a pod on a CPU node.

    Annotations of the overlay itself are kept.
    """
    group = worker_group_of(cluster, CPU_STAGE)
    resources = group.container.get("resources", {})
    told = {
        ONE_OFF_POOL_ANNOTATION: (group.pod.get("nodeSelector") or {}).get(POOL_LABEL, ""),
        ONE_OFF_CPUS_ANNOTATION: resources.get("requests", {}).get("cpu", "0"),
        ONE_OFF_MEMORY_ANNOTATION: resources.get("limits", {}).get("memory", "0"),
    }
    annotations = namespace["metadata"].setdefault("annotations", {})
    annotations.update({name: str(value) for name, value in told.items() if name not in annotations})


def fill_quota(quota: Object, cluster: Object) -> None:
    """Set the ResourceQuota to the requests of all pods: worker groups at full size, heads, Jobs and one-offs."""
    hard = quota["spec"]["hard"]
    jobs = int(hard[MAX_JOBS])
    asked = defaultdict(Decimal, {name: amount * jobs for name, amount in JOB_REQUESTS.items()})
    pods = jobs
    for containers, count in _pods(cluster):
        pods += count
        for container in containers:
            for name, amount in container.get("resources", {}).get("requests", {}).items():
                asked[name] += quantity(amount) * count
    amounts = {COUNTED[name]: f"{asked[name]:f}" for name in COUNTED}
    quota["spec"]["hard"] = {"pods": str(pods), **amounts} | hard


def _pods(cluster: Object) -> Iterator[tuple[list[Object], int]]:
    """The containers of every kind of pod, and the largest number of pods of that kind."""
    spec = cluster["spec"]
    yield spec["headGroupSpec"]["template"]["spec"]["containers"], MAX_HEADS
    yield worker_group_of(cluster, CPU_STAGE).pod["containers"], MAX_ONE_OFFS
    for group in spec["workerGroupSpecs"]:
        yield group["template"]["spec"]["containers"], int(group["maxReplicas"])
