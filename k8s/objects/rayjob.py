"""The RayJob of an attempt. The controller renders it from worker group and deployment; the operator submits it."""

from __future__ import annotations

import copy
import json
import shlex

from k8s.objects.api import Api, Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import (
    CLUSTER,
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    NODES_KEY,
    STAGE_LABEL,
)
from k8s.objects.worker_group import WorkerGroup, render_worker_group
from services.common.artifacts.attempt import Attempt
from services.common.launch.launcher import DRIVER_SHARE

RAYJOB_ENDS = ("Complete", "Failed", "ValidationFailed")


def render_rayjob(group: WorkerGroup, deployment: Deployment, attempt: int, nodes: int) -> Object:
    """A RayJob on the shared cluster: submitted over HTTP, its driver on one of the stage's pods."""
    job = _rayjob(group, deployment, attempt, nodes)
    job["spec"]["clusterSelector"] = {"ray.io/cluster": CLUSTER}
    return job


def render_isolated_rayjob(worker_group: WorkerGroup, deployment: Deployment, attempt: int) -> Object:
    """A RayJob with a cluster of its own, whose head too runs the stage's image: its Ray and Python may differ."""
    spec = copy.deepcopy(worker_group.cluster["spec"])
    spec.pop("upgradeStrategy", None)  # refused in a RayJob's cluster
    spec["rayVersion"] = deployment.ray_version or spec["rayVersion"]
    spec["authOptions"] = spec.get("authOptions", {}) | {"secretName": CLUSTER}
    head = spec["headGroupSpec"]["template"]
    head["metadata"].setdefault("labels", {})[COMPONENT_LABEL] = "isolated-head"  # another than the cluster's
    head["spec"]["containers"][0]["image"] = deployment.image
    group = render_worker_group(worker_group, deployment)
    group["replicas"] = deployment.nodes
    spec["workerGroupSpecs"] = [group]
    job = _rayjob(worker_group, deployment, attempt, deployment.nodes)
    job["spec"] |= {"rayClusterSpec": spec, "shutdownAfterJobFinishes": True}
    return job


def _rayjob(group: WorkerGroup, deployment: Deployment, attempt: int, nodes: int) -> Object:
    name = deployment.rayjob_name(attempt)
    words = group.entrypoint(list(deployment.arguments_for(nodes)), Attempt(f"{group.name}-{deployment.id}", attempt))
    metadata = {"stage": group.name, "deployment": deployment.id, "image": deployment.image, NODES_KEY: str(nodes)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": {STAGE_LABEL: group.name, DEPLOYMENT_LABEL: deployment.id}},
        "spec": {
            "jobId": name,
            "submissionMode": "HTTPMode",  # no submitter pod whose loss would fail a healthy run
            "entrypoint": shlex.join(words),
            "entrypointResources": json.dumps({group.routing_resource: DRIVER_SHARE}),
            "metadata": metadata,
            # No deadline and no backoffLimit: with clusterSelector the one leaves the Ray job running and the other is
            # refused. Retries and deadlines are the deploy Job's.
        },
    }


def rayjobs_of(api: Api, stage: str) -> list[Object]:
    return api.find_all("RayJob", f"{STAGE_LABEL}={stage}")


def nodes_of(job: Object, deployment: Deployment) -> int:
    """Nodes on which the RayJob's attempt runs."""
    return int(job["spec"].get("metadata", {}).get(NODES_KEY) or deployment.nodes)


def has_ended(job: Object) -> bool:
    return (job.get("status") or {}).get("jobDeploymentStatus") in RAYJOB_ENDS


def is_over(job: Object, ended: list[str]) -> bool:
    """May another attempt start beside it? The operator has seen its end, or Ray told it and the record has it.

    The last attempt, where it was given up without such a word, is being deleted, and is waited for until it is gone.
    """
    metadata = job["metadata"]
    is_given_up = metadata["name"] in ended[-1:] and "deletionTimestamp" in metadata
    return has_ended(job) or (metadata["name"] in ended and not is_given_up)


def has_run(job: Object) -> bool:
    """Did the operator see the job in Ray once?"""
    return bool((job.get("status") or {}).get("jobStatus"))
