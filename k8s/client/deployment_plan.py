"""Describes a deployment on KubeRay before it is made: cost, nodes, image, restarts and timeouts, and its manifests."""

from __future__ import annotations

from typing import TextIO

import yaml

from deploy.client.outline import Outline
from k8s.client.compile_tasks import tasks_of_a_pod
from k8s.client.node_pool_view import describe_cost, describe_reservation, describe_source
from k8s.objects.api import API_VERSIONS, Api, Object
from k8s.objects.attempt import render_isolated_rayjob, render_pod_group, render_rayjob
from k8s.objects.deploy_job import render_deploy_job, render_recipe_config_map
from k8s.objects.deployment import Deployment
from k8s.objects.names import CLUSTER, recipe_name
from k8s.objects.worker_group import WorkerGroup, groups_with, render_worker_group

TRACES = {"cpu": "without a device", "device": "on a device, whose node is paid for until the last graph is compiled"}


def describe_plan(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    """The plan for a person, one fact a line, the cost first."""
    settings = outline.compile
    has_tasks = group.name == "compiler" and outline.has_compile_tasks
    between = " without a new checkpoint between them" if group.name == "trainer" else ""
    fewer = ", ".join(map(str, deployment.fewer_nodes))
    measured = f"; its slowest checkpoint took {group.checkpoint_seconds} s" if group.checkpoint_seconds else ""
    facts = {
        "cost": describe_cost(group, deployment, outline),
        "nodes": describe_source(group, deployment),
        "capacity": describe_reservation(group, deployment, outline),
        "stage": f"{group.name}: {outline.describe_topology(group.name, deployment.nodes, 'pods')}",
        "tasks": has_tasks
        and f"{settings.num_workers} graphs at a time, each with {settings.task_cpus} CPUs and "
        f"{settings.task_memory_gib:g} GiB, {tasks_of_a_pod(group, outline)} on a pod",
        "traces": has_tasks and f"{TRACES[outline.compile.trace_on]} (COMPILER_POOL)",
        "image": _change(group.image, deployment.image),
        "recipe": f"{outline.name}, ConfigMap "
        + _change(group.recipe, recipe_name(group.name, deployment.recipe_digest)),
        "arguments": " ".join(deployment.arguments) or "none",
        "restarts": _restarts(group, deployment),
        "retries": f"{deployment.retries}{between}, after exit code 75 or a lost head",
        "waits": f"{deployment.start_timeout_seconds} s for its pods at first (WAIT), and "
        f"{deployment.loss_timeout_seconds} s after a loss, while the other nodes are held (WAIT_AFTER_LOSS)",
        "fewer": fewer and f"after a loss without a spare node it continues on {fewer} nodes (cluster.min_nodes)",
        "limit": deployment.limit_seconds
        and f"{deployment.limit_seconds / 3600:g} h from now on, with all waits and attempts: then a checkpoint and "
        f"exit code 75",
        "grace": f"{deployment.drain_seconds} s from SIGTERM to SIGKILL of a pod (DRAIN){measured}",
        "afterwards": deployment.keep and "KEEP=1: the pods stay up and hold their nodes until make stop-stage",
    }
    return "\n".join(f"{what:<12s}{text}" for what, text in facts.items() if text)


def _restarts(group: WorkerGroup, deployment: Deployment) -> str:
    if deployment.mode == "isolated":
        return "nothing: a Ray cluster of its own starts, and ends with the stage"
    names = [each["groupName"] for each in group.cluster["spec"]["workerGroupSpecs"]]
    others = [name for name in names if name != group.name]
    kept = f"the head and {' and '.join(others)} keep their pods"
    if group.replicas and render_worker_group(group, deployment)["template"] != group.spec["template"]:
        return f"{group.replicas} {group.name} pods that an earlier deployment left up; {kept}"
    return f"nothing: {group.replicas} -> {deployment.nodes} {group.name} pods; {kept}"


def _change(before: str, after: str) -> str:
    return f"{after} (unchanged)" if before == after else f"{before} -> {after}"


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
