"""The objects of one attempt: the PodGroup, by which Volcano places its gang, and the RayJob, which KubeRay submits."""

from __future__ import annotations

import copy
import json
import shlex
from decimal import ROUND_UP, Decimal

from k8s.objects.api import Api, Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import (
    CLUSTER,
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    NODES_KEY,
    PLACED_FOR_ANNOTATION,
    RUN_LABEL,
    STAGE_LABEL,
)
from k8s.objects.worker_group import WorkerGroup, render_worker_group
from services.common.launch.launcher import DRIVER_SHARE

RAYJOB_ENDS = ("Complete", "Failed", "ValidationFailed")


def render_rayjob(group: WorkerGroup, deployment: Deployment, attempt: int, nodes: int) -> Object:
    """A RayJob on the shared RayCluster, submitted over HTTP, whose driver runs on one of the stage's pods."""
    job = _rayjob(group, deployment, attempt, nodes)
    job["spec"]["clusterSelector"] = {"ray.io/cluster": CLUSTER}
    return job


def render_isolated_rayjob(
    worker_group: WorkerGroup, deployment: Deployment, attempt: int, ray_version: str = ""
) -> Object:
    """A RayJob with its own Ray cluster, whose head runs the stage's image as well: Ray and Python may differ.

    `ray_version` is that of the image; empty for that of the shared RayCluster.
    """
    spec = copy.deepcopy(worker_group.cluster["spec"])
    spec.pop("upgradeStrategy", None)  # refused in a RayJob's cluster
    spec["rayVersion"] = ray_version or spec["rayVersion"]
    spec["authOptions"] = spec.get("authOptions", {}) | {"secretName": CLUSTER}
    head = spec["headGroupSpec"]["template"]
    head["metadata"].setdefault("labels", {})[COMPONENT_LABEL] = "isolated-head"  # the shared head's is `head`
    head["spec"]["containers"][0]["image"] = deployment.image
    group = render_worker_group(worker_group, deployment)
    group["replicas"] = deployment.nodes
    spec["workerGroupSpecs"] = [group]
    job = _rayjob(worker_group, deployment, attempt, deployment.nodes)
    job["spec"] |= {"rayClusterSpec": spec, "shutdownAfterJobFinishes": True}
    return job


def _rayjob(group: WorkerGroup, deployment: Deployment, attempt: int, nodes: int) -> Object:
    name = deployment.rayjob_name(attempt)
    words = group.entrypoint(list(deployment.arguments_for(nodes)))
    metadata = {"stage": group.name, "deployment": deployment.id, "image": deployment.image, NODES_KEY: str(nodes)}
    labels = {STAGE_LABEL: group.name, DEPLOYMENT_LABEL: deployment.id, RUN_LABEL: deployment.run_label}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "jobId": name,
            "submissionMode": "HTTPMode",  # no submitter pod whose loss would fail a healthy run
            "entrypoint": shlex.join(words),
            "entrypointResources": json.dumps({group.routing_resource: DRIVER_SHARE}),
            "metadata": metadata,
            # No deadline and no backoffLimit: with clusterSelector a deadline leaves the Ray job running, and KubeRay
            # refuses a backoffLimit. The deploy Job has retries and deadlines.
        },
    }


def rayjobs_of(api: Api, stage: str) -> list[Object]:
    return api.find_all("RayJob", f"{STAGE_LABEL}={stage}")


def nodes_of(job: Object) -> int:
    """Number of nodes on which the RayJob's attempt runs."""
    return int(job["spec"]["metadata"][NODES_KEY])


def has_ended(job: Object) -> bool:
    """Whether the KubeRay operator says that the RayJob has ended."""
    return (job.get("status") or {}).get("jobDeploymentStatus") in RAYJOB_ENDS


def has_been_submitted(job: Object) -> bool:
    """Whether the operator has ever seen the RayJob's job in Ray."""
    return bool((job.get("status") or {}).get("jobStatus"))


def render_pod_group(group: WorkerGroup, deployment: Deployment, attempt: int, nodes: int) -> Object:
    """The PodGroup of one attempt. It lives no longer than the deployment: an empty one holds room in its queue."""
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": group.pod_group,
            "labels": {STAGE_LABEL: group.name},
            "annotations": {PLACED_FOR_ANNOTATION: deployment.rayjob_name(attempt)},
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
