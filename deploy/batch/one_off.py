"""One-offs on AWS Batch: a subcommand of a stage as a job of one CPU node, followed to its end."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TextIO

from deploy.batch.config import Config
from deploy.batch.job_definition import DEPLOYMENT_TAG, OneOff, Request, read_container, render_one_off_definition
from deploy.batch.jobs import Definition, Job, Jobs
from deploy.batch.plan import write_definition
from deploy.batch.request import DEFAULT_RECIPE, find_image, read_settings
from deploy.batch.watch import follow
from deploy.client.one_off import (
    OneOffRecipe,
    OneOffRequest,
    Reception,
    complete_words,
    describe_judge,
    identify,
    needs_recipe,
    only_overrides,
    read_named_recipe,
    require_known,
)
from deploy.client.request import user_name
from deploy.exit_codes import EXIT_AGAIN
from images.registry import find_labels
from services.common.errors import DeviceError, LimitError
from services.common.launch.batch.node import pack_recipe
from services.common.process.subcommands import ONE_OFF
from services.common.recipe.schema import Stage


@dataclass(frozen=True)
class _Prepared:
    """A one-off that nothing speaks against."""

    one_off: OneOff
    body: Request
    """Of its job definition."""
    plan: str

    @property
    def identity(self) -> str:
        return str(self.body["tags"][DEPLOYMENT_TAG])


def run_one_off(config: Config, jobs: Jobs, request: OneOffRequest, output: TextIO | None) -> int:
    """Show the plan, submit, follow: the subcommand's own exit code. Ctrl-C ends the job.

    The same that this person has asked for and that goes on is followed in place of a second one.
    """
    prepared = _prepare(config, jobs, request)
    print(prepared.plan, flush=True)
    if request.is_dry_run:
        if output:
            output.write(f"---\n{write_definition(prepared.body)}")
            output.flush()
        print("\nDRY_RUN=1: nothing was changed")
        return 0
    if problem := jobs.explain_queue(config.cpu.queue):
        raise DeviceError(f"{request.stage} {request.words[0]} is not submitted, nothing was changed: {problem}")
    job_id = _find_or_submit(config, jobs, prepared)
    if not request.is_followed:
        print(f"job {job_id} goes on: the same command without FOLLOW=0 shows it, and Ctrl-C ends it then")
        return 0
    reception = Reception(request, f"{ONE_OFF}-{job_id}")
    try:
        follow(jobs, job_id, take=reception.take)
    except KeyboardInterrupt:
        if job := jobs.find(job_id):
            jobs.terminate(job, f"Ctrl-C in make stage-run, {user_name()}")
        print(f"\njob {job_id} is terminated: its container gets SIGTERM")
        raise
    code = _exit_code(jobs.find(job_id))
    reception.write()
    return code


def _prepare(config: Config, jobs: Jobs, request: OneOffRequest) -> _Prepared:
    """Raises `RecipeError` and `DeviceError` for what cannot be; nothing is registered."""
    stage = request.stage
    definitions = jobs.definitions(stage)
    image = _choose_image(config, jobs, stage, request.tag, definitions)
    labels = find_labels(image)
    require_known(request, image, labels)
    recipe = _choose_recipe(request, definitions) if needs_recipe(request) else None
    words = complete_words(request, recipe)
    one_off = OneOff(
        stage=stage,
        digest=identify(request, image, words, recipe),
        image=image,
        words=words,
        bring=request.bring,
        recipe=pack_recipe(recipe.text.encode()) if recipe else "",
        seconds=request.seconds,
    )
    plan = [*_describe(config, one_off, recipe), describe_judge(labels)]
    return _Prepared(one_off, render_one_off_definition(config, one_off), "\n".join(filter(None, plan)))


def _choose_image(config: Config, jobs: Jobs, stage: Stage, tag: str, definitions: list[Definition]) -> str:
    """The image that TAG names; else that of the newest deployment, or the working tree's."""
    if tag or not definitions:
        return find_image(config, jobs, stage, tag)
    return str(read_container(definitions[0].body)["image"])


def _choose_recipe(request: OneOffRequest, definitions: list[Definition]) -> OneOffRecipe:
    """The recipe that RECIPE names; else that of the stage's newest deployment with its overrides, or the default."""
    if request.recipe or not definitions:
        return read_named_recipe(request.recipe or DEFAULT_RECIPE)
    before = read_settings(definitions[0])
    origin = f"that of the {request.stage}'s newest deployment"
    return OneOffRecipe(before.recipe_text, only_overrides(before.arguments), origin)


def _describe(config: Config, one_off: OneOff, recipe: OneOffRecipe | None) -> list[str]:
    price, hours = config.cpu.shape.price, one_off.seconds / 3600
    lines = [
        f"cost        {config.cpu.shape.name} at ${price.dollars_per_hour:,.2f} an hour: "
        f"${price.dollars_per_hour * hours:,.2f} at most, after {hours:g} h (HOURS=; list price of {price.region}, "
        f"{price.dated})",
        f"nodes       queue {config.cpu.queue}: one node comes for the job and goes some minutes after it",
        f"runs        {one_off.stage}: {shlex.join(one_off.words)}",
        f"image       {one_off.image}",
        f"recipe      {recipe.described if recipe else 'none: the subcommand takes none'}",
    ]
    if one_off.bring:
        lines.append(f"brings      {' '.join(one_off.bring)}")
    return lines


def _find_or_submit(config: Config, jobs: Jobs, prepared: _Prepared) -> str:
    """The id of the job that runs just this."""
    stage = prepared.one_off.stage
    same = [each for each in jobs.definitions(stage, of_one_offs=True) if each.deployment == prepared.identity]
    known = {each.arn for each in same}
    active = [job for job in jobs.find_all(stage, of_one_offs=True) if job.is_active and job.definition in known]
    if active:
        print(f"job {active[0].id} is just the same, and {active[0].status.lower()}: following it", flush=True)
        return active[0].id
    definition = same[0] if same else jobs.register(prepared.body)
    job_id = jobs.submit(stage, config.cpu.queue, definition, f"{ONE_OFF}-{prepared.one_off.words[0]}")
    print(f"submitted   job {job_id}, {definition.arn.rpartition('/')[2]}, to {config.cpu.queue}", flush=True)
    return job_id


def _exit_code(job: Job | None) -> int:
    """The exit code of a job that has ended. A signal ends one at its limit of memory or time, or with its host."""
    if job is None:
        return EXIT_AGAIN
    if "OutOfMemory" in job.reason:
        return LimitError.exit_code
    return job.exit_code if job.exit_code <= 128 else EXIT_AGAIN
