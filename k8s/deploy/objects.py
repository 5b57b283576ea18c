"""The objects that a deployment makes: recipe, PodGroup, RayJob, deploy Job. All follow from the worker group."""

from __future__ import annotations

import copy
import json
import shlex
from decimal import ROUND_UP, Decimal

from k8s.deploy.api import Object
from k8s.deploy.deployment import Deployment
from k8s.deploy.names import (
    CLUSTER,
    COMPONENT_LABEL,
    DEPLOYER,
    DEPLOYMENT_LABEL,
    KEEP_ANNOTATION,
    NODES_KEY,
    PLACED_FOR_ANNOTATION,
    STAGE_LABEL,
    job_name,
    recipe_name,
)
from k8s.deploy.stage import Stage
from services.common.launch.launcher import DRIVER_SHARE

LOG_FOLDER = "log"
JOB_MARGIN_SECONDS = 120
MOST_FAILURES = 1000  # of a deploy Job's pods
# Kubernetes' own is 300 s. What the pod does another goes on with, and its gang needs it.
LOST_NODE_SECONDS = 30
LOST_NODE_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    for state, seconds in (("not-ready", LOST_NODE_SECONDS), ("unreachable", LOST_NODE_SECONDS))
]
# Of the deploy Job's process, when the outcome is written and everything is down. Whatever else it ends with, such as
# Python's own 1 and 2, makes Kubernetes start it again.
EXIT_ENDED_BADLY = 64
DRAIN_MARGIN_SECONDS = 30  # KubeRay's and Ray's own way down
DRAIN_VARIABLES = ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "RAY_JOB_STOP_WAIT_TIME_S")


def recipe_config_map(stage: str, text: str, digest: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": recipe_name(stage, digest), "labels": {STAGE_LABEL: stage}},
        "immutable": True,
        "data": {"recipe.toml": text},
    }


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


def rayjob(stage: Stage, deployment: Deployment, attempt: int, nodes: int) -> Object:
    """A RayJob on the shared cluster: submitted over HTTP, its driver on one of the stage's pods."""
    job = _rayjob(stage, deployment, attempt, nodes)
    job["spec"]["clusterSelector"] = {"ray.io/cluster": CLUSTER}
    return job


def isolated_rayjob(stage: Stage, deployment: Deployment, attempt: int) -> Object:
    """A RayJob with a cluster of its own, whose head too runs the stage's image: its Ray and Python may differ."""
    spec = copy.deepcopy(stage.cluster["spec"])
    spec.pop("upgradeStrategy", None)  # refused in a RayJob's cluster
    spec["rayVersion"] = deployment.ray_version or spec["rayVersion"]
    spec["authOptions"] = spec.get("authOptions", {}) | {"secretName": CLUSTER}
    head = spec["headGroupSpec"]["template"]
    head["metadata"].setdefault("labels", {})[COMPONENT_LABEL] = "isolated-head"  # outside of the head's PDB
    head["spec"]["containers"][0]["image"] = deployment.image
    group = desired_group(stage, deployment)
    group["replicas"] = deployment.nodes
    spec["workerGroupSpecs"] = [group]
    job = _rayjob(stage, deployment, attempt, deployment.nodes)
    job["spec"] |= {"rayClusterSpec": spec, "shutdownAfterJobFinishes": True}
    return job


def desired_group(stage: Stage, deployment: Deployment) -> Object:
    """The worker group with the deployment's image, recipe and drain."""
    group = copy.deepcopy(stage.group)
    pod = group["template"]["spec"]
    pod["containers"][0]["image"] = deployment.image
    pod["volumes"][stage.recipe_index]["configMap"]["name"] = recipe_name(stage.name, deployment.recipe_digest)
    for variable in pod["containers"][0]["env"]:
        if variable["name"] in DRAIN_VARIABLES:
            variable["value"] = str(deployment.drain_seconds)
    pod["terminationGracePeriodSeconds"] = deployment.drain_seconds + DRAIN_MARGIN_SECONDS
    return group


def deploy_job(stage: Stage, deployment: Deployment) -> Object:
    """The Job that does the work in the cluster, from the head's image: a closed laptop holds no nodes."""
    head = stage.head_pod
    container = head["containers"][0]
    labels = {STAGE_LABEL: stage.name, DEPLOYMENT_LABEL: deployment.id, COMPONENT_LABEL: "deploy"}
    token = {"secretKeyRef": {"name": CLUSTER, "key": "auth_token"}}
    pod = {
        "serviceAccountName": DEPLOYER,
        "restartPolicy": "Never",
        # A Job that is deleted takes its stage down: a notice to the driver, then one to the pods.
        "terminationGracePeriodSeconds": 2 * deployment.drain_seconds + DRAIN_MARGIN_SECONDS + JOB_MARGIN_SECONDS,
        "securityContext": head["securityContext"],
        "volumes": head["volumes"],
        "nodeSelector": head.get("nodeSelector", {}),
        "tolerations": [*head.get("tolerations", []), *LOST_NODE_TOLERATIONS],
        "containers": [
            {
                "name": "deploy",
                "image": container["image"],
                "imagePullPolicy": container["imagePullPolicy"],
                "command": ["python", "-m", "k8s.deploy.job"],
                "args": [deployment.to_json()],
                "env": [
                    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "RAY_AUTH_MODE", "value": "token"},
                    {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
                ],
                "resources": {
                    "requests": {"cpu": "100m", "memory": "256Mi"},
                    "limits": {"memory": "1Gi"},
                },
                "securityContext": container["securityContext"],
                "volumeMounts": container["volumeMounts"],
            }
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(stage.name), "labels": labels},
        "spec": {
            # A pod that is deleted, evicted or lost comes back and goes on, how often that may be. One that ended a
            # deployment does not: it lowers the limit to the failures that there were (`no_more_failures`). A policy
            # on exit codes would say that, too, but with one Kubernetes makes no other pod while the old one is
            # Terminating, which on a lost node is for ever. The Lease keeps two pods from acting at once.
            "backoffLimit": MOST_FAILURES,
            "podReplacementPolicy": "TerminatingOrFailed",
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _rayjob(stage: Stage, deployment: Deployment, attempt: int, nodes: int) -> Object:
    name = deployment.rayjob(attempt)
    metadata = {"stage": stage.name, "deployment": deployment.id, "image": deployment.image, NODES_KEY: str(nodes)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": {STAGE_LABEL: stage.name, DEPLOYMENT_LABEL: deployment.id}},
        "spec": {
            "jobId": name,
            "submissionMode": "HTTPMode",  # no submitter pod whose loss would fail a healthy run
            "entrypoint": shlex.join(stage.entrypoint(list(deployment.arguments_for(nodes)))),
            "entrypointResources": json.dumps({stage.routing_resource: DRIVER_SHARE}),
            "metadata": metadata,
            # No deadline and no backoffLimit: with clusterSelector the one leaves the Ray job running and the other is
            # refused. Retries and deadlines are the deploy Job's.
        },
    }


def _amount(number: Decimal) -> str:
    """A quantity as the API takes it: whole numbers plainly, fractions in thousandths."""
    return str(int(number)) if number == int(number) else f"{int((number * 1000).to_integral_value(ROUND_UP))}m"
