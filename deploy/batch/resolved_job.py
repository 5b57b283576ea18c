"""Resolves a request for AWS Batch: its job queue, job definition and plan, in a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from deploy.batch.config import Config, JobQueue
from deploy.batch.job_definition import DEPLOYMENT_TAG, JobSpec, Request, queue_of, render_job_definition
from deploy.batch.jobs import BatchJob, Definition, Jobs
from deploy.client.instance_type import check_instance_type
from deploy.client.one_off_request import OneOffRequest, prepare_one_off
from deploy.client.outline import Outline
from deploy.client.request import RETRIES, DeployRequest
from deploy.client.requested_recipe import RequestedRecipe, parse_requested_recipe, read_requested_recipe
from deploy.reservation import explain_end
from deploy.stage_contract import size_variable
from images.platforms import find_variant
from images.versions import describe_build
from infra.shapes import Shape
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.recipe.schema import Stage

DEFAULT_RECIPE = Path("recipes/llama2-7b-trn1.toml")
"""The recipe of a request that names none."""
TIME_LIMIT = "--train.time_limit_seconds"
"""The option that ends every trainer before Batch ends its attempt."""
HOURS = 24.0
"""Limit of an attempt, in hours, where neither HOURS nor the recipe sets one."""
LIMIT_MARGIN_SECONDS = 3_600
"""Seconds of an attempt beyond the trainer's time limit, for the start of the nodes and the last checkpoint."""
CHANGE_END = "config.txt (CAPACITY_ENDS_AT); make infra-up STACK=batch writes both"
CHANGE_SHAPE = "TRAINIUM_SHAPE in config.txt, of another compute environment (make infra-up STACK=batch)"


@dataclass(frozen=True)
class ResolvedJob:
    """A deployment or a one-off that passed every check that needs no job, and the jobs that it was compared with."""

    queue: JobQueue
    spec: JobSpec
    body: Request
    """The request that registers the job definition."""
    plan: str
    """The plan for a person, one fact a line, the cost first."""
    same: Definition | None = None
    """The registered job definition of the identical deployment."""
    present: BatchJob | None = None
    """The job that already runs the identical deployment."""
    done: str = ""
    """Time at which the identical deployment was seen to have succeeded; empty where it was not, and for one-offs."""

    @property
    def stage(self) -> Stage:
        return self.spec.stage

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
    attempts = 1 + (RETRIES if request.retries is None else request.retries)
    attempt_seconds = _resolve_attempt_seconds(request, recipe.outline)
    if stage == "trainer":  # at its limit it commits a checkpoint and ends with 75: after Batch's there is no attempt
        most = attempt_seconds - min(LIMIT_MARGIN_SECONDS, attempt_seconds // 4)
        recipe = recipe.with_arguments(f"{TIME_LIMIT}={min(recipe.outline.train.time_limit_seconds or most, most)}")
    outline = recipe.outline
    nodes = outline.nodes_of(stage)
    is_on_device = outline.has_compile_tasks and outline.compile.trace_on == "device"
    queue = queue_of(config, stage, is_compiler_on_trainium=is_on_device)
    _require_capacity(config, queue, stage, nodes, outline)
    spec = JobSpec(stage, find_image(config, jobs, stage, request.tag), recipe, attempt_seconds, nodes, attempts)
    plan = [
        f"cost        {_describe_cost(queue.shape, nodes, attempt_seconds / 3600)}",
        f"nodes       queue {queue.name}: they start for the job and stop some minutes after it",
        f"stage       {stage}: {outline.describe_topology(stage, nodes, 'nodes')}",
        f"image       {spec.image}",
        f"recipe      {outline.name}, {recipe.digest[:10]}",
        f"arguments   {' '.join(recipe.arguments) or 'none'}",
        f"attempts    {spec.attempts}: after exit code 75, or after the main node lost its host",
        f"limit       {_describe_limit(spec, outline)}",
    ]
    return ResolvedJob(queue, spec, render_job_definition(config, queue, spec), "\n".join(plan))


def resolve_one_off(config: Config, jobs: Jobs, request: OneOffRequest) -> ResolvedJob:
    """Image and recipe are those of the newest deployment where the request names none, else the defaults.

    Registers nothing. Raises `RecipeError` for a wrong request, `DeviceError` for one that cannot be served.
    """
    stage, newest = request.stage, next(iter(jobs.definitions(request.stage)), None)
    image = find_image(config, jobs, stage, request.tag) if request.tag or not newest else newest.container["image"]
    prepared = prepare_one_off(
        request, image, lambda: read_recipe(newest) if newest else read_requested_recipe(DEFAULT_RECIPE)
    )
    spec = JobSpec(stage, image, prepared.recipe, request.seconds, words=prepared.words, digest=prepared.digest)
    plan = [
        f"cost        {_describe_cost(config.cpu.shape, 1, request.hours)}",
        f"nodes       queue {config.cpu.name}: one node starts for the job and stops some minutes after it",
        *prepared.plan,
    ]
    return ResolvedJob(config.cpu, spec, render_job_definition(config, config.cpu, spec), "\n".join(plan))


def read_recipe(definition: Definition) -> RequestedRecipe:
    """Recipe and requested options of a deployment. Raises `RecipeError` for a job definition that holds no recipe."""
    words = definition.container["command"]
    packed = [each["value"] for each in definition.container["environment"] if each["name"] == RECIPE_VARIABLE]
    if "--root" not in words or not packed:
        raise RecipeError(
            f"{definition.arn}, the newest job definition, runs no stage with a recipe in {RECIPE_VARIABLE}, so there "
            f"are no settings to repeat. Deregister it, or name them: make deploy-stage TAG= RECIPE= NODES= ARGS="
        )
    origin = f"job definition {definition.arn.rpartition('/')[2]}"
    recipe = parse_requested_recipe(unpack_recipe(packed[0]).decode(), origin)
    arguments = words[words.index("--root") + 2 :]
    if arguments and arguments[-1].startswith(f"{TIME_LIMIT}="):
        arguments.pop()  # it follows from the attempt's limit
    return recipe.with_arguments(*arguments)


def find_image(config: Config, jobs: Jobs, stage: Stage, tag: str) -> str:
    """The image of a tag, or of this checkout where `tag` is empty, by digest. Raises `DeviceError` for none in ECR."""
    variant = find_variant(config.trainium.shape.name)
    wanted = tag or describe_build(stage, variant).commit_tag
    found = jobs.resolve_image(stage, wanted)
    if not found:
        raise DeviceError(
            f"{config.image_of(stage)} has no image {wanted}: make images STAGE={stage} VARIANT={variant} "
            f"PUSH={config.ecr_repo.partition('/')[0]}, or name another with TAG="
        )
    return found


def _require_capacity(config: Config, queue: JobQueue, stage: Stage, nodes: int, outline: Outline) -> None:
    """Raise `DeviceError` where the queue's nodes are too few, of another type, or gone."""
    if nodes > queue.max_nodes:
        raise DeviceError(
            f"{size_variable(stage)}={nodes}, but queue {queue.name} has at most {queue.max_nodes} nodes of "
            f"{queue.shape.name}, so the job would never start. Use fewer nodes, or more in the stack's tfvars, then: "
            f"make infra-up STACK=batch"
        )
    if queue == config.trainium and (ended := explain_end(config.capacity_ends_at, CHANGE_END)):
        raise DeviceError(ended)
    if problem := check_instance_type(stage, outline, queue.shape.name, CHANGE_SHAPE):
        raise DeviceError(problem)
    size = outline.checkpoint_gb if stage == "trainer" and config.checkpoint_gb else None
    if size and size > config.checkpoint_gb:
        raise DeviceError(
            f"a checkpoint of recipe {outline.name} has {size:,.0f} GB, but the stop timeout of the machines suffices "
            f"for {config.checkpoint_gb:g} GB (CHECKPOINT_GB in config.txt): a trainer that is stopped would be killed "
            f"before it commits its checkpoint. Set checkpoint_gb = {math.ceil(size)} in the stack's tfvars, then: "
            f"make infra-up STACK=batch"
        )


def _resolve_attempt_seconds(request: DeployRequest, outline: Outline) -> int:
    if request.hours is not None:
        return round(request.hours * 3600)
    limit = outline.train.time_limit_seconds if request.stage == "trainer" else None
    return math.ceil(limit + LIMIT_MARGIN_SECONDS) if limit else round(HOURS * 3600)


def _describe_limit(spec: JobSpec, outline: Outline) -> str:
    """What follows when an attempt exceeds its limit. How long a run takes is unknown here: `plan` estimates it."""
    seconds = outline.train.time_limit_seconds
    if spec.stage != "trainer" or not seconds:
        return f"Batch ends an attempt of more than {spec.attempt_seconds / 3600:g} h, and makes no further one"
    return (
        f"{seconds / 3600:g} h of training an attempt, then a checkpoint, exit code 75 and the next attempt: "
        f"{spec.attempts * seconds / 3600:g} h at most (`millrace plan` estimates what the run needs)"
    )


def _describe_cost(shape: Shape, nodes: int, hours: float) -> str:
    if shape.price is None:
        return f"{nodes} x {shape.name}, whose price no public list has; an attempt ends after {hours:g} h"
    of_all = nodes * shape.price.dollars_per_hour
    return (
        f"{nodes} x {shape.name} x ${shape.price.dollars_per_hour:,.2f} = ${of_all:,.2f} an hour; an attempt ends "
        f"after {hours:g} h: ${of_all * hours:,.2f} at most ({shape.price.describe_origin()})"
    )
