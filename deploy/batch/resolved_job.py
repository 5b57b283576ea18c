"""Resolves a deploy request for AWS Batch: the deployment, its job queue and its job definition, in a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.batch.config import Config, JobQueue
from deploy.batch.job_definition import (
    DEPLOYMENT_TAG,
    BatchDeployment,
    Request,
    queue_of,
    read_container,
    render_job_definition,
)
from deploy.batch.jobs import Definition, Jobs
from deploy.client.instance_type import check_instance_type
from deploy.client.outline import Outline
from deploy.client.request import RETRIES, DeployRequest
from deploy.client.requested_recipe import RequestedRecipe, parse_requested_recipe
from deploy.reservation import explain_end
from images.platforms import find_variant
from images.versions import describe_build
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.recipe.schema import Stage

DEFAULT_RECIPE = Path("recipes/llama2-7b-trn1.toml")
"""The recipe of a request that names none."""
MAX_ATTEMPTS = 10
"""Batch's limit for the attempts of one job."""
LEAST_ATTEMPT_SECONDS = 60
HOURS = 24.0
"""Limit of an attempt, in hours, where neither HOURS nor the recipe sets one."""
LIMIT_MARGIN_SECONDS = 3_600
"""Seconds added to the recipe's time limit, for the start of the nodes and the last checkpoint."""
CHANGE_END = "config.txt (CAPACITY_ENDS_AT); make infra-up STACK=batch writes both"
CHANGE_SHAPE = "TRAINIUM_SHAPE in config.txt, of another compute environment (make infra-up STACK=batch)"


@dataclass(frozen=True)
class ResolvedJob:
    """A deployment that passed every check that needs no job."""

    queue: JobQueue
    deployment: BatchDeployment
    outline: Outline
    body: Request
    """The request that registers the job definition."""

    @property
    def identity(self) -> str:
        """The digest that identical deployments share."""
        return str(self.body["tags"][DEPLOYMENT_TAG])


def resolve_job(config: Config, jobs: Jobs, request: DeployRequest) -> ResolvedJob:
    """Changes nothing. Raises `RecipeError` for a wrong request, `DeviceError` for one that the account cannot serve.

    The image that this checkout builds knows the same recipe keys as this checkout, so a wrong key is refused here. An
    image that TAG names may know other keys, and judges the recipe itself.
    """
    stage, recipe = request.stage, request.find_recipe(DEFAULT_RECIPE)
    if not request.tag:
        recipe.require_known()
    nodes = request.nodes or recipe.outline.nodes_of(stage)
    if stage == "trainer" and nodes != recipe.outline.nodes_of(stage):
        recipe = recipe.with_arguments(f"--parallel.data_parallel_size={recipe.outline.data_parallel_size_on(nodes)}")
        if not request.tag:
            recipe.require_known()
    outline = recipe.outline
    retries, attempt_seconds = _resolve_retries(request), _resolve_attempt_seconds(request, outline)
    is_on_device = outline.has_compile_tasks and outline.compile.trace_on == "device"
    queue = queue_of(config, stage, is_compiler_on_trainium=is_on_device)
    _require_capacity(config, queue, stage, nodes, outline)
    deployment = BatchDeployment(
        stage=stage,
        image=find_image(config, jobs, stage, request.tag),
        nodes=nodes,
        recipe=outline.name,
        recipe_text=recipe.text,
        arguments=recipe.arguments,
        attempts=1 + retries,
        attempt_seconds=attempt_seconds,
    )
    return ResolvedJob(queue, deployment, outline, render_job_definition(config, queue, deployment))


def complete_from_definition(request: DeployRequest, before: Definition) -> DeployRequest:
    """The request, with recipe, options and nodes of an earlier deployment where it has none.

    Raises `RecipeError` for a job definition that somebody registered by hand and that holds no recipe.
    """
    recipe = read_recipe(before)
    return replace(
        request,
        nodes=request.nodes or int((before.body.get("nodeProperties") or {}).get("numNodes", 1)),
        arguments=recipe.arguments if request.arguments is None else request.arguments,
        recipe=request.recipe or replace(recipe, arguments=()),
    )


def read_recipe(definition: Definition) -> RequestedRecipe:
    """Recipe and options of a deployment. Raises `RecipeError` for a job definition that holds no recipe."""
    container = read_container(definition.body)
    words = container["command"]
    packed = [each["value"] for each in container["environment"] if each["name"] == RECIPE_VARIABLE]
    if "--root" not in words or not packed:
        raise RecipeError(
            f"{definition.arn}, the newest job definition, runs no stage with a recipe in {RECIPE_VARIABLE}, so there "
            f"are no settings to repeat. Deregister it, or name them: make deploy-stage TAG= RECIPE= NODES= ARGS="
        )
    origin = f"job definition {definition.arn.rpartition('/')[2]}"
    recipe = parse_requested_recipe(unpack_recipe(packed[0]).decode(), origin)
    return recipe.with_arguments(*words[words.index("--root") + 2 :])


def find_image(config: Config, jobs: Jobs, stage: Stage, tag: str) -> str:
    """The image of a tag, or of this checkout where `tag` is empty, by digest. Raises `DeviceError` for none in ECR."""
    variant = find_variant(config.trainium.shape.name)
    wanted = tag or describe_build(stage, variant).commit_tag
    found = jobs.resolve_image(stage, wanted)
    if not found:
        raise DeviceError(
            f"{config.image_of(stage)} has no image {wanted}: make images STAGE={stage} VARIANT={variant} "
            f"PUSH={config.repository.partition('/')[0]}, or name another with TAG="
        )
    return found


def _require_capacity(config: Config, queue: JobQueue, stage: Stage, nodes: int, outline: Outline) -> None:
    """Raise `DeviceError` where the queue's nodes are too few, of another type, or gone."""
    if nodes > queue.max_nodes:
        raise DeviceError(
            f"NODES={nodes}, but queue {queue.name} has at most {queue.max_nodes} nodes of {queue.shape.name}, so the "
            f"job would never start. Use fewer NODES, or more nodes in the stack's tfvars, then: make infra-up "
            f"STACK=batch"
        )
    if queue is config.trainium and (ended := explain_end(config.capacity_ends_at, CHANGE_END)):
        raise DeviceError(ended)
    if problem := check_instance_type(stage, outline, queue.shape.name, CHANGE_SHAPE):
        raise DeviceError(problem)
    if stage == "trainer" and (problem := _explain_large_checkpoint(config, outline)):
        raise DeviceError(problem)


def _explain_large_checkpoint(config: Config, outline: Outline) -> str:
    """The reason why a stopped trainer would be killed before it commits its checkpoint; empty where it is not."""
    size = outline.checkpoint_gb
    if size is None or config.checkpoint_gb is None or size <= config.checkpoint_gb:
        return ""
    return (
        f"a checkpoint of recipe {outline.name} has {size:,.0f} GB, but the stop timeout of the machines suffices for "
        f"{config.checkpoint_gb:g} GB (CHECKPOINT_GB in config.txt): a trainer that is stopped would be killed before "
        f"it commits its checkpoint. Set checkpoint_gb = {math.ceil(size)} in the stack's tfvars, then: make infra-up "
        f"STACK=batch"
    )


def _resolve_retries(request: DeployRequest) -> int:
    retries = RETRIES if request.retries is None else request.retries
    if retries >= MAX_ATTEMPTS:
        raise RecipeError(
            f"RETRIES={retries}: Batch makes at most {MAX_ATTEMPTS} attempts of a job, so RETRIES is at most "
            f"{MAX_ATTEMPTS - 1}. Repeat the command after that: the stage continues"
        )
    return retries


def _resolve_attempt_seconds(request: DeployRequest, outline: Outline) -> int:
    if request.hours is not None:
        seconds = round(request.hours * 3600)
        if seconds < LEAST_ATTEMPT_SECONDS:
            raise RecipeError(
                f"HOURS={request.hours:g} is {seconds} s, but Batch's shortest limit of an attempt is "
                f"{LEAST_ATTEMPT_SECONDS} s"
            )
        return seconds
    limit = outline.train.time_limit_seconds if request.stage == "trainer" else None
    return round(limit + LIMIT_MARGIN_SECONDS) if limit else round(HOURS * 3600)
