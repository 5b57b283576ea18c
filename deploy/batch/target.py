"""AWS Batch as a target of deployments. Batch keeps a job, tries it again and gives its nodes back, whoever watches."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from deploy.batch.config import CONFIG, Config, read_config
from deploy.batch.job_definition import read_container
from deploy.batch.jobs import Definition, Job, Jobs
from deploy.batch.one_off import run_one_off
from deploy.batch.plan import describe_definition, describe_plan, write_definition
from deploy.batch.request import Prepared, complete_from_definition, prepare
from deploy.batch.watch import follow
from deploy.client.one_off import OneOffRequest
from deploy.client.request import DeployRequest, require_stage_name, user_name
from infra.account.session import Account
from services.common.errors import DeviceError
from services.common.recipe.schema import STAGES, Stage

STOP_SECONDS = 900.0
"""Seconds in which a job is gone that was told to end, where its machines allow no more."""
STOP_MARGIN_SECONDS = 300.0
"""Beyond the notice of the machines, for what ends after the checkpoint and until Batch says so."""
POLL_SECONDS = 5.0


def connect_batch(path: Path | None = None) -> Batch:
    """Raises `RecipeError` without a config.txt."""
    config = read_config(path or CONFIG)
    return Batch(config, Jobs(Account(config.region), config))


@dataclass(frozen=True)
class _Checked:
    """A stage as it is asked for, and what Batch knows of it."""

    prepared: Prepared
    definitions: list[Definition]
    """Of the stage, newest first."""
    present: Job | None
    """The job that runs just so already."""
    done: str
    """When the same was seen to have ended well; empty: never."""


class Batch:
    """The queues of one `config.txt`."""

    def __init__(self, config: Config, jobs: Jobs) -> None:
        self._config, self._jobs = config, jobs

    def deploy(self, request: DeployRequest, output: TextIO | None) -> int:
        """What runs just so is followed, and what ended well just so is not run again (AGAIN=1 does)."""
        checked = self._check(request)
        stage, present = checked.prepared.deployment.stage, checked.present
        if present:
            print(f"{stage} runs just so as job {present.id} ({present.status}): following it", flush=True)
            return 0 if request.is_dry_run else self._follow(present.id, request)
        self._show(checked)
        if checked.done:
            print(f"{stage} ended well just so, {checked.done}: nothing is submitted")
            if not request.is_again:
                print("AGAIN=1 submits it all the same")
                return 0
        self._require_ready(checked.prepared)
        if request.is_dry_run:
            return self._show_dry_run(checked.prepared, output)
        return self._follow(self._submit(checked), request)

    def show_status(self) -> int:
        print(f"batch       {self._config.name}, {self._config.region}")
        for stage in STAGES:
            print(f"\n{stage}")
            jobs, definitions = self._look(stage)
            for job in jobs[:1]:
                known = next((each for each in definitions if each.arn == job.definition), None)
                print("\n".join(f"  {line}" for line in _describe_job(job, known)))
            if not jobs:
                print("  no job that Batch still knows")
            good = [each for each in definitions if each.ended_well]
            if good:
                print(f"  good      {read_container(good[0].body)['image']}, {good[0].ended_well}")
        return 0

    def show_log(self, stage: Stage) -> int:
        follow(self._jobs, self._newest(stage).id, is_log_whole=True)
        return 0

    def stop(self, stage: Stage) -> int:
        """A job that waits for nodes is gone at once; one that runs gets SIGTERM, which the trainer turns into a
        checkpoint."""
        active = [job for job in self._jobs.find_all(stage) if job.is_active]
        for job in active:
            print(f"stopping {stage}, job {job.id}: its main node gets SIGTERM", flush=True)
            self._jobs.terminate(job, f"make stop-stage, {user_name()}")
        allowed = max(STOP_SECONDS, self._config.notice_seconds + STOP_MARGIN_SECONDS)
        deadline = time.monotonic() + allowed
        while any(job.is_active for job in active):
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{stage} does not end within {allowed:.0f} s; Batch kills it after the host's stop timeout: "
                    f"make stage-status TARGET=batch"
                )
            time.sleep(POLL_SECONDS)
            active = [found for job in active if (found := self._jobs.find(job.id))]
        print(f"{stage} is down: no job of it waits or runs")
        return 0

    def roll_back(self, request: DeployRequest, output: TextIO | None) -> int:
        """With the recipe, options and nodes of the newest deployment, where no others are named."""
        stage = require_stage_name(request.stage)
        _, definitions = self._look(stage)
        if not definitions:
            raise DeviceError(f"{stage} was never deployed here: make deploy-stage STAGE={stage} TARGET=batch")
        present = read_container(definitions[0].body)["image"]
        good = [read_container(each.body)["image"] for each in definitions[1:] if each.ended_well]
        earlier = [image for image in good if image != present]
        if not earlier:
            raise DeviceError(
                f"no image of {stage} before {present} is known to have ended well: make deploy-stage TAG= names one"
            )
        print(f"rolling {stage} back: {present} -> {earlier[0]}", flush=True)
        again = replace(complete_from_definition(request, definitions[0]), tag=earlier[0].rpartition("@")[2])
        prepare(self._config, self._jobs, again)
        if not request.is_dry_run:
            self.stop(stage)
        return self.deploy(again, output)

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        return run_one_off(self._config, self._jobs, request, output)

    def run_pipeline(self, request: DeployRequest, output: TextIO | None) -> int:
        """Each job waits in Batch for the one before, so that it goes on without this process.

        All three are checked before the first is submitted: no node is paid for on the way to a refusal.
        """
        checked = [self._check(replace(request, stage=stage)) for stage in STAGES]
        ended = [*takewhile(lambda each: each.done and not each.present and not request.is_again, checked)]
        for each in checked[len(ended) :]:
            if not each.present:
                self._require_ready(each.prepared)
        submitted: list[str] = []
        for each in checked:
            print(f"\n== {each.prepared.deployment.stage}", flush=True)
            self._show(each)
            if each.present:
                print(f"runs just so as job {each.present.id}", flush=True)
                submitted.append(each.present.id)
            elif each in ended:
                print(f"ended well just so, {each.done}: nothing is submitted")
            elif request.is_dry_run:
                self._show_dry_run(each.prepared, output)
            else:
                submitted.append(self._submit(each, submitted[-1] if submitted else ""))
        for job_id in submitted if request.is_followed and not request.is_dry_run else []:
            if code := follow(self._jobs, job_id):
                return code
        return 0

    def _check(self, request: DeployRequest) -> _Checked:
        prepared = prepare(self._config, self._jobs, request)
        jobs, definitions = self._look(prepared.deployment.stage)
        present = _find_present(prepared, jobs, definitions)
        return _Checked(prepared, definitions, present, _describe_done(prepared, definitions))

    def _look(self, stage: Stage) -> tuple[list[Job], list[Definition]]:
        """Jobs that Batch still knows, and job definitions, which by now say which of them ended well."""
        jobs = self._jobs.find_all(stage)
        good = {job.definition for job in jobs if job.status == "SUCCEEDED"}
        return jobs, [
            self._jobs.note_end(each) if each.arn in good and not each.ended_well else each
            for each in self._jobs.definitions(stage)
        ]

    def _show(self, checked: _Checked) -> None:
        prepared, before = checked.prepared, next(iter(checked.definitions), None)
        print(describe_plan(prepared.pool, prepared.deployment, prepared.outline, prepared.body, before), flush=True)

    def _show_dry_run(self, prepared: Prepared, output: TextIO | None) -> int:
        if output:
            output.write(f"---\n{write_definition(prepared.body)}")
            output.flush()
        else:
            print(f"\n{describe_definition(prepared.body)}")
        print("\nDRY_RUN=1: nothing was changed")
        return 0

    def _require_ready(self, prepared: Prepared) -> None:
        if problem := self._jobs.explain_queue(prepared.pool.queue):
            raise DeviceError(f"{prepared.deployment.stage} is not deployed, nothing was changed: {problem}")

    def _submit(self, checked: _Checked, after: str = "") -> str:
        prepared = checked.prepared
        same = [each for each in checked.definitions if each.deployment == prepared.identity]
        definition = same[0] if same else self._jobs.register(prepared.body)
        stage, recipe = prepared.deployment.stage, prepared.deployment.recipe
        job_id = self._jobs.submit(stage, prepared.pool.queue, definition, recipe, after)
        waits = f", after job {after}" if after else ""
        print(
            f"submitted   job {job_id}, {definition.arn.rpartition('/')[2]}, to {prepared.pool.queue}{waits}",
            flush=True,
        )
        return job_id

    def _follow(self, job_id: str, request: DeployRequest) -> int:
        return follow(self._jobs, job_id) if request.is_followed else 0

    def _newest(self, stage: Stage) -> Job:
        jobs = self._jobs.find_all(stage)
        if not jobs:
            raise DeviceError(
                f"{stage} has no job that Batch still knows; logs of earlier ones are in log group "
                f"{self._config.log_groups[stage]}"
            )
        return jobs[0]


def _describe_job(job: Job, definition: Definition | None) -> list[str]:
    image = read_container(definition.body)["image"] if definition else "a job definition that is not active any more"
    lines = [
        f"image     {image}",
        f"job       {job.id}, {job.nodes} nodes, since {job.created_at:%Y-%m-%dT%H:%M:%SZ}",
    ]
    lines += [
        f"attempt   {number} ended with {'no exit code' if code is None else f'exit code {code}'}"
        for number, code in enumerate(job.attempts, start=1)
    ]
    if job.is_active:
        lines.append(f"now       {job.status.lower()}{f': {job.reason}' if job.reason else ''}")
    else:
        lines.append(f"outcome   exit code {job.exit_code}{f': {job.reason}' if job.reason else ''}")
    return lines


def _find_present(prepared: Prepared, jobs: list[Job], definitions: list[Definition]) -> Job | None:
    """The job that runs just this. Raises `DeviceError` for one that runs another."""
    stage = prepared.deployment.stage
    active = [job for job in jobs if job.is_active]
    same = {each.arn for each in definitions if each.deployment == prepared.identity}
    others = [job for job in active if job.definition not in same]
    if others:
        raise DeviceError(
            f"{stage} runs as job {others[0].id} since {others[0].created_at:%Y-%m-%dT%H:%MZ} "
            f"({others[0].status}), and you ask for another. Wait for it (make stage-logs STAGE={stage} "
            f"TARGET=batch) or end it first (make stop-stage STAGE={stage} TARGET=batch)."
        )
    return active[0] if active else None


def _describe_done(prepared: Prepared, definitions: list[Definition]) -> str:
    """When the same ended well; empty where it never did."""
    ends = [each.ended_well for each in definitions if each.deployment == prepared.identity and each.ended_well]
    return f"seen at {ends[0]}" if ends else ""
