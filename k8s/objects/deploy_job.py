"""The deploy Job. The client creates it, and the controller in it does the deployment's work."""

from __future__ import annotations

from k8s.objects.api import Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import (
    CLUSTER,
    COMPONENT_LABEL,
    DEPLOYER,
    DEPLOYMENT_LABEL,
    REGION_ANNOTATION,
    STAGE_LABEL,
    job_name,
)
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, WorkerGroup

JOB_MARGIN_SECONDS = 120
MOST_FAILURES = 1000  # of a deploy Job's pods
# Kubernetes' own is 300 s. What the pod does another goes on with, and its gang needs it.
LOST_NODE_SECONDS = 30
LOST_NODE_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
    for state, seconds in (("not-ready", LOST_NODE_SECONDS), ("unreachable", LOST_NODE_SECONDS))
]
# Those that the admission policy `millrace-jobs` lets through: others, such as AWS_CONFIG_FILE, name programs to run.
AWS_VARIABLES = (
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
# Of the deploy Job's process, when the outcome is written and everything is down. Whatever else it ends with, such as
# Python's own 1 and 2, makes Kubernetes start it again.
EXIT_ENDED_BADLY = 64


def aws_variables(group: WorkerGroup) -> list[Object]:
    """Where the nodes' cloud is: its region, and what else the overlay says of AWS to the head, such as an endpoint."""
    said = group.head_pod["containers"][0].get("env") or []
    region = (group.cluster["metadata"].get("annotations") or {}).get(REGION_ANNOTATION)
    variables = [
        each for each in said if each["name"] in AWS_VARIABLES and (each["name"] != "AWS_REGION" or not region)
    ]
    return [*([{"name": "AWS_REGION", "value": region}] if region else []), *variables]


def render_head_program(
    group: WorkerGroup,
    *,
    name: str,
    program: str,
    argument: str,
    variables: list[Object],
    volumes: tuple[str, ...] | None,
    grace_seconds: int,
) -> Object:
    """A pod that runs `python -m PROGRAM ARGUMENT` of the head's image where the head may run, as the deployer.

    It has the head's `volumes` of these names, or all.
    """
    head = group.head_pod
    container = head["containers"][0]
    return {
        "serviceAccountName": DEPLOYER,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": head["securityContext"],
        "volumes": [each for each in head["volumes"] if volumes is None or each["name"] in volumes],
        "nodeSelector": head.get("nodeSelector", {}),
        "tolerations": [*head.get("tolerations", []), *LOST_NODE_TOLERATIONS],
        "containers": [
            {
                "name": name,
                "image": container["image"],
                "imagePullPolicy": container["imagePullPolicy"],
                "command": ["python", "-m", program],
                "args": [argument],
                "env": [
                    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    *variables,
                    *aws_variables(group),
                ],
                "resources": {
                    "requests": {"cpu": "100m", "memory": "256Mi"},
                    "limits": {"memory": "1Gi"},
                },
                "securityContext": container["securityContext"],
                "volumeMounts": [
                    each for each in container["volumeMounts"] if volumes is None or each["name"] in volumes
                ],
            }
        ],
    }


def render_deploy_job(group: WorkerGroup, deployment: Deployment) -> Object:
    """The Job that does the work in the cluster, from the head's image: a closed laptop holds no nodes."""
    labels = {STAGE_LABEL: group.name, DEPLOYMENT_LABEL: deployment.id, COMPONENT_LABEL: "deploy"}
    token = {"secretKeyRef": {"name": CLUSTER, "key": "auth_token"}}
    pod = render_head_program(
        group,
        name="deploy",
        program="k8s.controller.job",
        argument=deployment.to_json(),
        variables=[
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
        ],
        volumes=None,
        # A Job that is deleted takes its stage down: a notice to the driver, then one to the pods.
        grace_seconds=2 * deployment.drain_seconds + DRAIN_MARGIN_SECONDS + JOB_MARGIN_SECONDS,
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(group.name), "labels": labels},
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
