"""The deploy Job, in whose pod the controller runs a deployment, and the other objects that the client creates for it:
the ConfigMap of the recipe, and short Jobs.
"""

from __future__ import annotations

import shlex

from deploy.stage_contract import RECIPE, RECIPE_FILE, ROOT, SCRATCH
from k8s.objects.api import Api, Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import (
    BEFORE_ANNOTATION,
    CLUSTER,
    COMPONENT_LABEL,
    DEPLOYER,
    DEPLOYMENT_LABEL,
    PREFLIGHT,
    REGION_ANNOTATION,
    RUN_LABEL,
    STAGE_LABEL,
    job_name,
    recipe_name,
)
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, WorkerGroup

JOB_MARGIN_SECONDS = 120
MAX_FAILURES = 1000
"""Failures of a deploy Job's pods before Kubernetes gives the Job up: more than ever happen."""
# Kubernetes' default is 300 s. A new pod continues the work of the lost one, and the gang needs it.
LOST_NODE_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for state in ("not-ready", "unreachable")
]
# The admission policy `millrace-jobs` accepts these alone: others, such as AWS_CONFIG_FILE, name programs to run.
AWS_VARIABLES = (
    *("AWS_REGION", "AWS_ENDPOINT_URL"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
KEPT_SECONDS = 3_600
"""Seconds for which an ended one-off is kept, so that a client that lost its connection can still show its end."""
EXIT_ENDED_BADLY = 64
"""Exit code of the deploy Job's program after the outcome is written and everything is down. Kubernetes restarts the
program after every other non-zero code, such as Python's own 1 and 2."""
# By default every container, the stage's image included, gets the token of the pod's account, and on EKS its AWS role.
TOKEN = {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
TOKEN_SOURCES = [
    {"serviceAccountToken": {"path": "token"}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
]
WITHOUT_AWS = {"eks.amazonaws.com/skip-containers": PREFLIGHT}


def aws_variables(group: WorkerGroup) -> list[Object]:
    """The AWS region, and the other AWS variables that the overlay gives the head, such as an endpoint."""
    given = group.head_pod["containers"][0].get("env") or []
    region = (group.cluster["metadata"].get("annotations") or {}).get(REGION_ANNOTATION)
    variables = [
        each for each in given if each["name"] in AWS_VARIABLES and (each["name"] != "AWS_REGION" or not region)
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
    """A pod that runs `python -m PROGRAM ARGUMENT` in the head's image, as the deployer, on a node for the head.

    The pod mounts the head's `volumes` of these names, or all of them for None.
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
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
                "securityContext": container["securityContext"],
                "volumeMounts": [
                    each for each in container["volumeMounts"] if volumes is None or each["name"] in volumes
                ],
            }
        ],
    }


def render_deploy_job(group: WorkerGroup, deployment: Deployment, before: Deployment | None = None) -> Object:
    """The Job that runs a deployment from the head's image, so that a closed laptop holds no nodes.

    It keeps the last deployment `before` it that its image accepted.
    """
    annotations = {BEFORE_ANNOTATION: before.to_json()} if before else {}
    labels = {STAGE_LABEL: group.name, DEPLOYMENT_LABEL: deployment.id, COMPONENT_LABEL: "deploy"}
    labels |= {RUN_LABEL: deployment.run_label}
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
        # A deleted Job takes its stage down first: a notice to the driver, then one to the pods.
        grace_seconds=2 * deployment.drain_seconds + DRAIN_MARGIN_SECONDS + JOB_MARGIN_SECONDS,
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(group.name), "labels": labels, "annotations": annotations},
        "spec": {
            # A pod that is deleted, evicted or lost is replaced, however often. A pod that ended the deployment is not:
            # it lowers the limit to the failures that there were (`Reconciler`). A policy on exit codes would say the
            # same, but with one Kubernetes replaces no pod that is still Terminating, which on a lost node is for
            # ever. A pod waits until older ones have ended.
            "backoffLimit": MAX_FAILURES,
            "podReplacementPolicy": "TerminatingOrFailed",
            "template": {
                "metadata": {"labels": labels, "annotations": WITHOUT_AWS},
                "spec": _with_preflight(pod, group, deployment),
            },
        },
    }


def _with_preflight(pod: Object, group: WorkerGroup, deployment: Deployment) -> Object:
    """The pod with an init container of the stage's image, which has no rights of the pod's account.

    It shares only the file system with the controller, whose HOME is on /scratch. It answers by its termination
    message, of which kubelet keeps the last 4 KiB: the controller reads no file that the image could replace. The last
    line is the exit code of the check, and the container ends with 0 in any case: a failed pod would be replaced.
    """
    words = ["python", "-m", "services.common.process.readiness", "--stage", group.name, "--root", group.root]
    words += ["--recipe", f"{group.recipe_folder}/{RECIPE_FILE}", *deployment.arguments]
    secrets = [each for place in (group.head_pod, group.pod) for each in place.get("imagePullSecrets", [])]
    [controller] = pod["containers"]
    said = {"terminationMessagePolicy": "FallbackToLogsOnError"}  # the last lines of a program that crashed
    asked = said | {
        "name": PREFLIGHT,
        "image": deployment.image,
        "imagePullPolicy": group.container["imagePullPolicy"],
        "command": ["sh", "-c", f"{{ {shlex.join(words)}; echo $?; }} 2>&1 | tee /dev/termination-log"],
        "resources": controller["resources"],
        "securityContext": group.container["securityContext"],
        "volumeMounts": [
            {"name": PREFLIGHT, "mountPath": SCRATCH.path},
            {"name": ROOT.name, "mountPath": group.root},
            {"name": RECIPE.name, "mountPath": group.recipe_folder, "readOnly": True},
        ],
    }
    volumes: list[Object] = [
        {"name": RECIPE.name, "configMap": {"name": recipe_name(group.name, deployment.recipe_digest)}},
        {"name": PREFLIGHT, "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": TOKEN["name"], "projected": {"sources": TOKEN_SOURCES}},
    ]
    return pod | {
        "automountServiceAccountToken": False,
        **({"imagePullSecrets": secrets} if secrets else {}),
        "volumes": pod["volumes"] + volumes,
        "initContainers": [asked],
        "containers": [controller | said | {"volumeMounts": [*controller["volumeMounts"], TOKEN]}],
    }


def render_short_job(name: str, labels: dict[str, str], pod: Object, *, limit_seconds: int, tries: int = 0) -> Object:
    """The Job of a pod with these labels. `tries` is the number of further pods after one that failed."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": tries,
            "activeDeadlineSeconds": limit_seconds,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def render_recipe_config_map(stage: str, text: str, digest: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": recipe_name(stage, digest), "labels": {STAGE_LABEL: stage}},
        "immutable": True,
        "data": {RECIPE_FILE: text},
    }


def find_recipe_text(api: Api, stage: str, digest: str) -> str | None:
    """The recipe of an earlier deployment; None where its ConfigMap was deleted."""
    kept = api.find("ConfigMap", recipe_name(stage, digest))
    return str(kept["data"][RECIPE_FILE]) if kept else None
