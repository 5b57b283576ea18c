"""Runs a subcommand of a stage on AWS Batch: as a job of one CPU node, followed to its end."""

from __future__ import annotations

import getpass
import shlex
from dataclasses import dataclass
from typing import TextIO

from deploy.batch.config import Config
from deploy.batch.job_definition import (
    DEPLOYMENT_TAG,
    BatchOneOff,
    Request,
    read_container,
    render_one_off_definition,
)
from deploy.batch.job_plan import write_definition
from deploy.batch.job_watch import follow
from deploy.batch.jobs import BatchJob, Definition, Jobs
from deploy.batch.resolved_job import DEFAULT_RECIPE, find_image, read_recipe
from deploy.client.one_off_request import (
    OneOffRequest,
    complete_words,
    describe_judge,
    identify,
    needs_recipe,
    require_known,
)
from deploy.client.requested_recipe import RequestedRecipe, read_requested_recipe
from deploy.exit_codes import EXIT_AGAIN
from images.registry import find_labels
from services.common.errors import DeviceError, LimitError
from services.common.process.subcommands import ONE_OFF
from services.common.recipe.packed_recipe import pack_recipe
from services.common.recipe.schema import Stage


@dataclass(frozen=True)
class _ResolvedOneOff:
    """A one-off that passed every check that needs no job."""

    one_off: BatchOneOff
    body: Request
    """The request that registers the job definition."""
    plan: str

    @property
    def identity(self) -> str:
        return str(self.body["tags"][DEPLOYMENT_TAG])


def run_one_off(config: Config, jobs: Jobs, request: OneOffRequest, output: TextIO | None) -> int:
    """Show the plan, submit the job and follow it: the subcommand's own exit code. Ctrl-C ends the job.

    Where an identical request of the same person already runs, its job is followed and none is submitted.
    """
    resolved = _resolve(config, jobs, request)
    print(resolved.plan, flush=True)
    if request.is_dry_run:
        if output:
            output.write(f"---\n{write_definition(resolved.body)}")
            output.flush()
        print("\nDRY_RUN=1: nothing was changed")
        return 0
    if problem := jobs.explain_queue(config.cpu.name):
        raise DeviceError(f"{request.stage} {request.words[0]} is not submitted, nothing was changed: {problem}")
    job_id = _find_or_submit(config, jobs, resolved)
    if not request.is_followed:
        print(f"job {job_id} continues. The same command without FOLLOW=0 follows it, and Ctrl-C then ends it")
        return 0
    try:
        follow(jobs, job_id)
    except KeyboardInterrupt:
        if job := jobs.find(job_id):
            jobs.terminate(job, f"Ctrl-C in make stage-run, {getpass.getuser()}")
        print(f"\njob {job_id} is terminated: its container gets SIGTERM")
        raise
    return _read_exit_code(jobs.find(job_id))


def _resolve(config: Config, jobs: Jobs, request: OneOffRequest) -> _ResolvedOneOff:
    """Registers nothing. Raises `RecipeError` for a wrong request, `DeviceError` for one that cannot be served."""
    stage = request.stage
    definitions = jobs.definitions(stage)
    image = _choose_image(config, jobs, stage, request.tag, definitions)
    labels = find_labels(image)
    require_known(request, image, labels)
    recipe = _choose_recipe(request, definitions) if needs_recipe(request) else None
    words = complete_words(request, recipe)
    one_off = BatchOneOff(
        stage=stage,
        digest=identify(request, image, words, recipe),
        image=image,
        words=words,
        recipe=pack_recipe(recipe.text.encode()) if recipe else "",
        seconds=request.seconds,
    )
    plan = [*_describe(config, one_off, recipe), describe_judge(labels)]
    return _ResolvedOneOff(one_off, render_one_off_definition(config, one_off), "\n".join(filter(None, plan)))


def _choose_image(config: Config, jobs: Jobs, stage: Stage, tag: str, definitions: list[Definition]) -> str:
    """The image that TAG names; else that of the newest deployment; else that of this checkout."""
    if tag or not definitions:
        return find_image(config, jobs, stage, tag)
    return str(read_container(definitions[0].body)["image"])


def _choose_recipe(request: OneOffRequest, definitions: list[Definition]) -> RequestedRecipe:
    """The recipe that RECIPE names; else that of the newest deployment, with its overrides; else the default."""
    if request.recipe or not definitions:
        return request.recipe or read_requested_recipe(DEFAULT_RECIPE)
    return read_recipe(definitions[0]).with_overrides_only()


def _describe(config: Config, one_off: BatchOneOff, recipe: RequestedRecipe | None) -> list[str]:
    price, hours = config.cpu.shape.price, one_off.seconds / 3600
    assert price, "every shape of CPU nodes has a price"
    return [
        f"cost        {config.cpu.shape.name} at ${price.dollars_per_hour:,.2f} an hour: "
        f"${price.dollars_per_hour * hours:,.2f} at most, after {hours:g} h (HOURS=; "
        f"{price.describe_origin()})",
        f"nodes       queue {config.cpu.name}: one node starts for the job and stops some minutes after it",
        f"runs        {one_off.stage}: {shlex.join(one_off.words)}",
        f"image       {one_off.image}",
        f"recipe      {recipe.describe() if recipe else 'none: the subcommand takes none'}",
    ]


def _find_or_submit(config: Config, jobs: Jobs, resolved: _ResolvedOneOff) -> str:
    """The id of the job that runs the identical request."""
    stage = resolved.one_off.stage
    same = [each for each in jobs.definitions(stage, of_one_offs=True) if each.deployment == resolved.identity]
    known = {each.arn for each in same}
    active = [job for job in jobs.find_all(stage, of_one_offs=True) if job.is_active and job.definition in known]
    if active:
        print(f"job {active[0].id} already runs this request ({active[0].status.lower()}); following it", flush=True)
        return active[0].id
    definition = same[0] if same else jobs.register(resolved.body)
    job_id = jobs.submit(stage, config.cpu.name, definition, f"{ONE_OFF}-{resolved.one_off.words[0]}")
    print(f"submitted   job {job_id}, {definition.arn.rpartition('/')[2]}, to {config.cpu.name}", flush=True)
    return job_id


def _read_exit_code(job: BatchJob | None) -> int:
    """Exit code of an ended job. Codes above 128 are signals: the limit of memory or time, or a lost host."""
    if job is None:
        return EXIT_AGAIN
    if "OutOfMemory" in job.reason:
        return LimitError.exit_code
    return job.exit_code if job.exit_code <= 128 else EXIT_AGAIN
