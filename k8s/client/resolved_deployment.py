"""Resolves a deploy request for KubeRay: the deployment of a worker group, and its recipe."""

from __future__ import annotations

import getpass
import math
import secrets
from dataclasses import replace
from pathlib import Path

from deploy.client.outline import Outline
from deploy.client.request import RETRIES, DeployRequest
from deploy.client.requested_recipe import RequestedRecipe, parse_requested_recipe
from k8s.client.compile_tasks import TASKS, choose_trace_option, pods_of, tasks_of_a_pod
from k8s.client.stage_image import choose_image
from k8s.objects.api import Api
from k8s.objects.deploy_job import find_recipe_text
from k8s.objects.deployment import Deployment
from k8s.objects.names import recipe_name
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError, RecipeError
from services.common.process.shutdown import needed_grace_seconds
from services.common.recipe.schema import Stage

DEFAULT_RECIPE = Path("recipes/tiny-cpu.toml")
"""The recipe of a request that names none, on a cluster whose overlay names none."""
START_TIMEOUT_SECONDS = 1_800
"""Seconds in which a gang must be placed before the first attempt, where WAIT is not given."""
LOSS_TIMEOUT_SECONDS = 6 * 3600
"""Seconds in which lost nodes must be replaced, where WAIT_AFTER_LOSS is not given: enough for node repair, for a
capacity pool, or for a person on the next morning."""


def resolve(api: Api, group: WorkerGroup, request: DeployRequest) -> tuple[Deployment, RequestedRecipe]:
    """The deployment, and the recipe with the options that it runs.

    Raises `RecipeError` for a wrong request, `DeviceError` for an image that neither registry nor nodes have.

    The image that this checkout builds knows the same recipe keys as this checkout, so a wrong key is refused here. An
    image that TAG names may know other keys; preflight asks that image.
    """
    stage = request.stage
    if request.mode == "isolated" and request.is_kept:
        raise RecipeError("KEEP=1 with MODE=isolated: a Ray cluster of the stage's own always ends with the stage")
    recipe = request.find_recipe(default_recipe_of(group))
    if not request.tag:
        recipe.require_known()
    if stage == "compiler":
        recipe = _fit_to_pods(recipe, group)
    outline = recipe.outline
    deployment = Deployment(
        stage=stage,
        id=secrets.token_hex(3),
        image=choose_image(api, stage, group.variant, group.container, request.tag),
        nodes=_nodes_of(stage, group, outline),
        mode=request.mode or "shared",
        recipe_digest=recipe.digest,
        arguments=recipe.arguments,
        retries=_given(request.retries, RETRIES),
        keep=request.is_kept,
        user=getpass.getuser(),
        start_timeout_seconds=_given(request.start_timeout_seconds, START_TIMEOUT_SECONDS),
        loss_timeout_seconds=_given(request.loss_timeout_seconds, LOSS_TIMEOUT_SECONDS),
        limit_seconds=math.ceil((request.hours or 0) * 3600),
        drain_seconds=_given(request.drain_seconds, _needed_drain_seconds(group)),
        recipe=outline.name,
        fewer_nodes=_fewer_nodes(outline) if stage == "trainer" and request.mode != "isolated" else (),
        workers_per_node=outline.cluster.trainer_workers_per_node,
        tensor_parallel_size=outline.parallel.tensor_parallel_size,
        node_pool=group.node_pool,
        capacity_ends_at=group.capacity_ends_at,
    )
    return deployment, recipe


def default_recipe_of(group: WorkerGroup) -> Path:
    """The recipe of a request that names none: the overlay's, which the cluster's images accept."""
    return Path(group.default_recipe or DEFAULT_RECIPE)


def complete_request(api: Api, group: WorkerGroup, request: DeployRequest, before: Deployment | None) -> DeployRequest:
    """The request, with recipe, options, nodes and mode of the stage's last deployment where it has none.

    Raises `DeviceError` where the request names no recipe and the last deployment's is gone.
    """
    if before is None:
        if request.recipe is None:
            raise DeviceError(
                f"{group.name} has no deployment any more from which the recipe could be taken: name it with RECIPE= "
                f"(and ARGS=, NODES=)"
            )
        return request
    recipe = request.recipe
    if recipe is None:
        name = f"ConfigMap {recipe_name(group.name, before.recipe_digest)}"
        text = find_recipe_text(api, group.name, before.recipe_digest)
        if text is None:
            raise DeviceError(f"the recipe of the last deployment ({name}) is gone: name one with RECIPE=")
        recipe = parse_requested_recipe(text, name)
    return replace(request.repeat(recipe.with_arguments(*before.arguments)), mode=request.mode or before.mode)


def _fit_to_pods(recipe: RequestedRecipe, group: WorkerGroup) -> RequestedRecipe:
    """The compiler's recipe with those options that follow from its pods: where it traces, and how many tasks it has.

    Tasks fill the pods of `cluster.compiler_nodes`; without that key, `compile.num_workers` decides the pods.
    """
    if option := choose_trace_option(group, recipe.outline):
        recipe = recipe.with_arguments(option)
    outline = recipe.outline
    nodes = _nodes_of("compiler", group, outline)
    if outline.has_compile_tasks and pods_of(group, outline) != nodes:
        recipe = recipe.with_arguments(f"{TASKS}={nodes * tasks_of_a_pod(group, outline)}")
    return recipe


def _nodes_of(stage: Stage, group: WorkerGroup, outline: Outline) -> int:
    """Nodes of the stage's gang: those of the recipe, or as many as its compile tasks fill where it has none."""
    if stage == "compiler" and outline.has_compile_tasks and not outline.cluster.has_compiler_nodes:
        return pods_of(group, outline)
    return outline.nodes_of(stage)


def _fewer_nodes(outline: Outline) -> tuple[int, ...]:
    return outline.cluster.fewer_nodes(
        outline.parallel.num_workers, outline.parallel.tensor_parallel_size, outline.batch.num_micro_batches
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _needed_drain_seconds(group: WorkerGroup) -> int:
    """The manifests' grace period, or three times the duration of the slowest checkpoint where that is longer."""
    return max(group.drain_seconds, needed_grace_seconds(group.checkpoint_seconds))
