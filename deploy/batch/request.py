"""What a deploy request is resolved to on AWS Batch: a deployment, its queue, and its job definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.batch.config import Config, Pool
from deploy.batch.job_definition import (
    DEPLOYMENT_TAG,
    Deployment,
    Request,
    pool_of,
    read_container,
    render_job_definition,
)
from deploy.batch.jobs import Definition, Jobs
from deploy.client.instance_type import check_instance_type
from deploy.client.outline import Outline
from deploy.client.request import (
    DeployRequest,
    read_recipe_text,
    read_request_outline,
    require_free_arguments,
    require_stage_name,
)
from deploy.reservation import explain_end
from images.versions import describe_build
from services.common.errors import DeviceError, RecipeError
from services.common.launch.batch.node import RECIPE_VARIABLE, unpack_recipe
from services.common.recipe.schema import Stage

VARIANT = "neuron"
DEFAULT_RECIPE = Path("recipes/llama2-7b-trn1.toml")
"""The recipe of a deployment that names none. Images of the variant take no recipe for CPUs."""
MOST_ATTEMPTS = 10
"""That Batch makes of one job."""
LEAST_ATTEMPT_SECONDS = 60
HOURS = 24.0
"""After which an attempt is ended, unless the recipe or HOURS says otherwise."""
LIMIT_MARGIN_SECONDS = 3_600
"""Beyond the recipe's own time limit, for the start of the nodes and the last checkpoint."""
CHANGE_END = "config.txt (CAPACITY_ENDS_AT); make infra-up STACK=batch writes both"
CHANGE_SHAPE = "TRAINIUM_SHAPE in config.txt, of another compute environment (make infra-up STACK=batch)"


@dataclass(frozen=True)
class Prepared:
    """A deployment that nothing speaks against."""

    pool: Pool
    deployment: Deployment
    outline: Outline
    body: Request
    """Of its job definition."""

    @property
    def identity(self) -> str:
        return str(self.body["tags"][DEPLOYMENT_TAG])


def prepare(config: Config, jobs: Jobs, request: DeployRequest) -> Prepared:
    """Raises `RecipeError` and `DeviceError` for what cannot be; nothing is changed."""
    stage = require_stage_name(request.stage)
    _require_possible(request)
    if not request.recipe_text:
        request = replace(request, recipe=request.recipe or DEFAULT_RECIPE)
    text = request.recipe_text or read_recipe_text(request.recipe or DEFAULT_RECIPE)
    arguments = request.arguments or ()
    require_free_arguments(arguments)
    outline = read_request_outline(request, text, arguments)
    nodes = request.nodes if request.nodes is not None else outline.nodes_of(stage)
    if nodes < 1:
        raise RecipeError(f"NODES={nodes}: a stage needs at least one")
    if stage == "trainer" and nodes != outline.nodes_of(stage):
        arguments = (*arguments, f"--parallel.data_parallel_size={outline.data_parallel_size_on(nodes)}")
        outline = read_request_outline(request, text, arguments)
    is_on_device = outline.has_compile_tasks and outline.compile.trace_on == "device"
    pool = pool_of(config, stage, is_compiler_on_trainium=is_on_device)
    if nodes > pool.max_nodes:
        raise DeviceError(
            f"NODES={nodes}, and queue {pool.queue} has {pool.max_nodes} nodes of {pool.shape.name} at most: such a "
            f"job would wait for ever. Fewer NODES, or more in the stack's tfvars, then: make infra-up STACK=batch"
        )
    if pool is config.trainium and (ended := explain_end(config.capacity_ends_at, CHANGE_END)):
        raise DeviceError(ended)
    if problem := check_instance_type(stage, outline, pool.shape.name, CHANGE_SHAPE):
        raise DeviceError(problem)
    if stage == "trainer" and (problem := _explain_large_checkpoint(config, outline)):
        raise DeviceError(problem)
    deployment = Deployment(
        stage=stage,
        image=find_image(config, jobs, stage, request.tag),
        nodes=nodes,
        recipe=outline.name,
        recipe_text=text,
        arguments=arguments,
        attempts=request.retries + 1,
        attempt_seconds=_attempt_seconds(stage, request, outline),
    )
    return Prepared(pool, deployment, outline, render_job_definition(config, pool, deployment))


def complete_from_definition(request: DeployRequest, before: Definition) -> DeployRequest:
    """The settings with which the newest deployment ran, where nothing else was named.

    Raises `RecipeError` for a job definition that somebody registered by hand and that does not say it.
    """
    settings = read_settings(before)
    if request.nodes is None:
        request = replace(request, nodes=int((before.body.get("nodeProperties") or {}).get("numNodes", 1)))
    if request.arguments is None:
        request = replace(request, arguments=settings.arguments)
    if request.recipe is None:
        request = replace(request, recipe_text=settings.recipe_text)
    return request


@dataclass(frozen=True)
class Settings:
    """What a deployment ran with, by its job definition."""

    recipe_text: str
    arguments: tuple[str, ...]
    """Options after the stage's own `--recipe` and `--root`."""


def read_settings(definition: Definition) -> Settings:
    """Raises `RecipeError` for a job definition that somebody registered by hand and that does not say them."""
    container = read_container(definition.body)
    words = container["command"]
    packed = [each["value"] for each in container["environment"] if each["name"] == RECIPE_VARIABLE]
    if "--root" not in words or not packed:
        raise RecipeError(
            f"{definition.arn}, the newest job definition, runs no stage with a recipe in {RECIPE_VARIABLE}, so "
            f"nothing says what to run again. Deregister it, or name all: make deploy-stage TAG= RECIPE= NODES= ARGS="
        )
    return Settings(unpack_recipe(packed[0]).decode(), tuple(words[words.index("--root") + 2 :]))


def find_image(config: Config, jobs: Jobs, stage: Stage, tag: str) -> str:
    """The image of a tag, or that of the working tree, by its digest. Raises `DeviceError` where it is not there."""
    wanted = tag or describe_build(stage, VARIANT).commit_tag
    found = jobs.resolve_image(stage, wanted)
    if not found:
        raise DeviceError(
            f"{config.image_of(stage)} has no image {wanted}: make images STAGE={stage} VARIANT={VARIANT} "
            f"PUSH={config.repository.partition('/')[0]}, or name another with TAG="
        )
    return found


def _explain_large_checkpoint(config: Config, outline: Outline) -> str:
    """Why a trainer that is stopped would be killed before its checkpoint is committed; empty where it is not."""
    size = outline.checkpoint_gb
    if size is None or config.checkpoint_gb is None or size <= config.checkpoint_gb:
        return ""
    return (
        f"a checkpoint of recipe {outline.name} has {size:,.0f} GB, and the machines' stop timeout is made for "
        f"{config.checkpoint_gb:g} GB at most (CHECKPOINT_GB in config.txt): a trainer that is stopped would be killed "
        f"before it has committed one. checkpoint_gb = {math.ceil(size)} in the stack's tfvars, then: make infra-up "
        f"STACK=batch"
    )


def _attempt_seconds(stage: Stage, request: DeployRequest, outline: Outline) -> int:
    if request.hours is not None:
        seconds = round(request.hours * 3600)
        if seconds < LEAST_ATTEMPT_SECONDS:
            raise RecipeError(
                f"HOURS={request.hours:g} is {seconds} s, and Batch ends an attempt after {LEAST_ATTEMPT_SECONDS} s at "
                f"the earliest"
            )
        return seconds
    limit = outline.train.time_limit_seconds if stage == "trainer" else None
    return round(limit + LIMIT_MARGIN_SECONDS) if limit else round(HOURS * 3600)


def _require_possible(request: DeployRequest) -> None:
    """Raises `RecipeError` for what Batch cannot do."""
    if request.retries >= MOST_ATTEMPTS:
        raise RecipeError(
            f"RETRIES={request.retries}: Batch makes {MOST_ATTEMPTS} attempts of a job at most, so {MOST_ATTEMPTS - 1} "
            f"further ones. The same command submits it again after that, and it continues"
        )
