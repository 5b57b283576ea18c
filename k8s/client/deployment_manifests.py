"""Writes the manifests that a deployment would apply, as YAML for a review or for tools."""

from __future__ import annotations

from typing import TextIO

import yaml

from k8s.objects.api import API_VERSIONS, Api, Object
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import Deployment
from k8s.objects.names import CLUSTER
from k8s.objects.pod_group import render_pod_group
from k8s.objects.rayjob import render_isolated_rayjob, render_rayjob
from k8s.objects.recipe import render_recipe_config_map
from k8s.objects.worker_group import WorkerGroup, groups_with, render_worker_group


def write_manifests(file: TextIO, api: Api, group: WorkerGroup, deployment: Deployment, recipe_text: str) -> None:
    """Write every object that the client and its deploy Job create or change, in this order."""
    is_shared = deployment.mode == "shared"
    first = (
        render_rayjob(group, deployment, 1, deployment.nodes)
        if is_shared
        else render_isolated_rayjob(group, deployment, 1)
    )
    documents = [
        ("the client creates it", render_recipe_config_map(group.name, recipe_text, deployment.recipe_digest)),
        ("the client creates it; it creates the objects below", render_deploy_job(group, deployment)),
        ("while the stage is deployed", render_pod_group(group, deployment, 1, deployment.nodes)),
        *([("a patch, with the other groups as they are", _group_patch(group, deployment))] if is_shared else []),
        ("once the gang is placed; a further attempt gets another one", first),
    ]
    write_documents(file, api, documents)


def write_documents(file: TextIO, api: Api, documents: list[tuple[str, Object]]) -> None:
    """Write objects of the namespace, each with a comment."""
    for comment, each in documents:
        document = each | {"metadata": each["metadata"] | {"namespace": api.namespace}}
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
        file.write(f"---\n# {each['kind']} {each['metadata']['name']}: {comment}\n{text}")
    file.flush()


def _group_patch(worker_group: WorkerGroup, deployment: Deployment) -> Object:
    group = render_worker_group(worker_group, deployment) | {"replicas": deployment.nodes}
    return {
        "apiVersion": API_VERSIONS["RayCluster"],
        "kind": "RayCluster",
        "metadata": {"name": CLUSTER},
        "spec": {"workerGroupSpecs": groups_with(worker_group, group)},
    }
