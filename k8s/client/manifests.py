"""What a deployment would apply, as YAML: for a review, or for tools that look at manifests."""

from __future__ import annotations

from typing import TextIO

import yaml

from k8s.objects.api import API_VERSIONS, Api, Object
from k8s.objects.deploy_job import deploy_job
from k8s.objects.deployment import Deployment
from k8s.objects.names import CLUSTER
from k8s.objects.pod_group import pod_group
from k8s.objects.rayjob import isolated_rayjob, rayjob
from k8s.objects.recipe import recipe_config_map
from k8s.objects.worker_group import Stage, desired_group, groups_with


def write_manifests(file: TextIO, api: Api, stage: Stage, deployment: Deployment, recipe_text: str) -> None:
    """Every object that the client and its deploy Job make or change, in this order."""
    is_shared = deployment.mode == "shared"
    first = rayjob(stage, deployment, 1, deployment.nodes) if is_shared else isolated_rayjob(stage, deployment, 1)
    documents = [
        ("the client creates it", recipe_config_map(stage.name, recipe_text, deployment.recipe_digest)),
        ("the client creates it; it does what follows", deploy_job(stage, deployment)),
        ("while the stage is deployed", pod_group(stage, deployment, 1, deployment.nodes)),
        *([("a patch, with the other groups as they are", _group_patch(stage, deployment))] if is_shared else []),
        ("when the gang stands; another for each new attempt", first),
    ]
    for comment, each in documents:
        document = each | {"metadata": each["metadata"] | {"namespace": api.namespace}}
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
        file.write(f"---\n# {each['kind']} {each['metadata']['name']}: {comment}\n{text}")
    file.flush()


def _group_patch(stage: Stage, deployment: Deployment) -> Object:
    group = desired_group(stage, deployment) | {"replicas": deployment.nodes}
    return {
        "apiVersion": API_VERSIONS["RayCluster"],
        "kind": "RayCluster",
        "metadata": {"name": CLUSTER},
        "spec": {"workerGroupSpecs": groups_with(stage, group)},
    }
