"""What a deploy request is resolved to on KubeRay: a deployment of a worker group."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.client.outline import Outline
from deploy.client.request import (
    DEFAULT_RECIPE,
    DeployRequest,
    read_recipe_text,
    read_request_outline,
    require_free_arguments,
    require_stage_name,
    user_name,
)
from k8s.client.compile_tasks import TASKS, place_of_trace, pods_of, tasks_of_a_pod
from k8s.client.stage_image import choose_image
from k8s.objects.api import Api
from k8s.objects.deployment import DEGREE, Deployment
from k8s.objects.names import recipe_name
from k8s.objects.recipe import find_recipe_text
from k8s.objects.record import Record
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError, RecipeError
from services.common.process.termination_notice import needed_notice_seconds
from services.common.recipe.schema import Stage as StageName


@dataclass(frozen=True)
class ResolvedRequest:
    """The deployment that a request asks for, with the recipe that it was resolved from."""

    deployment: Deployment
    outline: Outline
    recipe_text: str


def resolve(api: Api, group: WorkerGroup, request: DeployRequest) -> ResolvedRequest:
    """Raises `RecipeError` for what cannot be, `DeviceError` for an image that is nowhere.

    The image that the working tree builds has the recipe's type that is here, and a wrong key is told at once. Of
    another image (TAG=), which may know other keys, the image itself is asked, in preflight.
    """
    if not request.recipe_text:
        request = replace(request, recipe=request.recipe or Path(group.default_recipe or DEFAULT_RECIPE))
    text = request.recipe_text or read_recipe_text(request.recipe or DEFAULT_RECIPE)
    arguments = request.arguments or ()
    name = require_stage_name(request.stage)
    require_free_arguments(arguments)
    outline = read_request_outline(request, text, arguments)
    nodes = request.nodes if request.nodes is not None else _nodes_of(name, group, outline)
    if nodes < 1:
        raise RecipeError(f"NODES={nodes}: a stage needs at least one")
    if request.mode == "isolated" and request.is_kept:
        raise RecipeError("KEEP=1 with MODE=isolated: a Ray cluster of a stage's own ends with the stage")
    if name == "trainer" and nodes != outline.nodes_of(name):
        arguments = (*arguments, f"{DEGREE}={outline.data_parallel_size_on(nodes)}")
        outline = read_request_outline(request, text, arguments)
    if name == "compiler" and (place := place_of_trace(group, outline)):
        arguments = (*arguments, place)
        outline = read_request_outline(request, text, arguments)
    if name == "compiler" and outline.has_compile_tasks and pods_of(group, outline) != nodes:
        arguments = (*arguments, f"{TASKS}={nodes * tasks_of_a_pod(group, outline)}")
        outline = read_request_outline(request, text, arguments)
    deployment = Deployment(
        stage=name,
        id=secrets.token_hex(3),
        image=choose_image(api, name, group.variant, group.container, request.tag),
        nodes=nodes,
        mode=request.mode or "shared",
        recipe_digest=hashlib.sha256(text.encode()).hexdigest(),
        arguments=arguments,
        retries=request.retries,
        keep=request.is_kept,
        user=user_name(),
        start_timeout_seconds=request.start_timeout_seconds,
        loss_timeout_seconds=request.loss_timeout_seconds,
        drain_seconds=request.drain_seconds or _needed_drain(group),
        recipe=outline.name,
        fewer_nodes=_fewer_nodes(outline) if name == "trainer" and request.mode != "isolated" else (),
        workers_per_node=outline.cluster.trainer_workers_per_node,
        tensor_parallel_size=outline.parallel.tensor_parallel_size,
        node_pool=group.node_pool,
        capacity_ends_at=group.capacity_ends_at,
    )
    return ResolvedRequest(deployment, outline, text)


def _nodes_of(stage: StageName, group: WorkerGroup, outline: Outline) -> int:
    """Nodes of the stage's gang: those of the recipe, or as many as its compile tasks fill where it says none."""
    if stage == "compiler" and outline.has_compile_tasks and not outline.cluster.has_compiler_nodes:
        return pods_of(group, outline)
    return outline.nodes_of(stage)


def _fewer_nodes(outline: Outline) -> tuple[int, ...]:
    return outline.cluster.fewer_nodes(
        outline.parallel.num_workers, outline.parallel.tensor_parallel_size, outline.batch.num_micro_batches
    )


def complete_from_record(api: Api, group: WorkerGroup, request: DeployRequest, record: Record | None) -> DeployRequest:
    """Fill in what was not typed (recipe, options, nodes, mode) from the record of the stage's newest deployment."""
    if record is None:
        if request.recipe is None:
            raise DeviceError(
                f"{group.name} has no deployment any more whose recipe could be taken over: RECIPE= (and ARGS=, NODES=)"
            )
        return request
    before = record.deployment
    request = replace(
        request, mode=request.mode or before.mode, nodes=request.nodes if request.nodes is not None else before.nodes
    )
    if request.arguments is None:
        request = replace(request, arguments=before.arguments)
    if request.recipe is None:
        text = find_recipe_text(api, group.name, before.recipe_digest)
        if text is None:
            name = recipe_name(group.name, before.recipe_digest)
            raise DeviceError(f"the recipe of the deployment before (ConfigMap {name}) is gone: name one with RECIPE=")
        request = replace(request, recipe_text=text)
    return request


def _needed_drain(group: WorkerGroup) -> int:
    """What the manifests say, or three times what the slowest checkpoint took where that is more."""
    return max(group.drain_seconds, needed_notice_seconds(group.checkpoint_seconds))
