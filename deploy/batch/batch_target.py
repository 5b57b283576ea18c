"""Deploys stages on AWS Batch. Batch itself keeps, retries and ends a job, so that no client has to stay connected."""

from __future__ import annotations

import getpass
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from deploy.batch.batch_one_off import run_one_off
from deploy.batch.config import CONFIG, Config, read_config
from deploy.batch.job_definition import read_container
from deploy.batch.job_plan import describe_definition, describe_plan, write_definition
from deploy.batch.job_watch import follow
from deploy.batch.jobs import BatchJob, Definition, Jobs
from deploy.batch.resolved_job import DEFAULT_RECIPE, ResolvedJob, read_recipe, resolve_job
from deploy.client.one_off_request import OneOffRequest
from deploy.client.pipeline_view import PipelineView
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from infra.account.session import Account
from services.common.errors import DeviceError
from services.common.recipe.schema import STAGES, Stage

STOP_SECONDS = 900.0
"""Shortest time, in seconds, that a job is given to end."""
STOP_MARGIN_SECONDS = 300.0
"""Seconds added to the machines' termination notice, in which Batch reports that the job has ended."""
POLL_SECONDS = 5.0


def connect_batch(path: Path | None = None) -> BatchTarget:
    """Raises `RecipeError` without a config.txt."""
    config = read_config(path or CONFIG)
    return BatchTarget(config, Jobs(Account(config.region), config))


@dataclass(frozen=True)
class _Checked:
    """A resolved deployment, compared with the jobs of its stage."""

    resolved: ResolvedJob
    definitions: list[Definition]
    """Job definitions of the stage, newest first."""
    present: BatchJob | None
    """The job that already runs the identical deployment."""
    done: str
    """Time at which the identical deployment was seen to have succeeded; empty where it was not."""


class BatchTarget:
    """The job queues of a `config.txt`. Its methods are those of `k8s.client.kuberay_target.KubeRayTarget`."""

    def __init__(self, config: Config, jobs: Jobs) -> None:
        self._config, self._jobs = config, jobs

    def deploy(self, request: DeployRequest, output: TextIO | None) -> int:
        """Deploy the stage, unless the identical deployment runs, or has succeeded and AGAIN=1 is not given."""
        return self._deploy(self._check(self._resolve(request)), request, output)

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
            good = [each for each in definitions if each.succeeded_at]
            if good:
                print(f"  good      {read_container(good[0].body)['image']}, {good[0].succeeded_at}")
        return 0

    def show_log(self, stage: Stage) -> int:
        follow(self._jobs, self._newest(stage).id, is_log_whole=True)
        return 0

    def stop(self, stage: Stage) -> int:
        """End the stage's jobs. A job that waits for nodes ends at once; a running trainer commits a checkpoint."""
        active = [job for job in self._jobs.find_all(stage) if job.is_active]
        for job in active:
            print(f"stopping {stage}, job {job.id}: its main node gets SIGTERM", flush=True)
            self._jobs.terminate(job, f"make stop-stage, {getpass.getuser()}")
        allowed = max(STOP_SECONDS, self._config.notice_seconds + STOP_MARGIN_SECONDS)
        deadline = time.monotonic() + allowed
        while any(job.is_active for job in active):
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{stage} did not end within {allowed:.0f} s. Batch kills it after the host's stop timeout: "
                    f"make stage-status TARGET=batch shows when"
                )
            time.sleep(POLL_SECONDS)
            active = [found for job in active if (found := self._jobs.find(job.id))]
        print(f"{stage} stopped: no waiting and no running job")
        return 0

    def roll_back(self, request: DeployRequest, output: TextIO | None) -> int:
        stage = request.stage
        _, definitions = self._look(stage)
        if not definitions:
            raise DeviceError(f"{stage} has no deployment here yet: make deploy-stage STAGE={stage} TARGET=batch")
        present = read_container(definitions[0].body)["image"]
        good = [read_container(each.body)["image"] for each in definitions[1:] if each.succeeded_at]
        earlier = [image for image in good if image != present]
        if not earlier:
            raise DeviceError(
                f"no earlier image of {stage} than {present} is known to have succeeded: make deploy-stage "
                f"STAGE={stage} TAG= deploys one that you name"
            )
        print(f"rolling {stage} back: {present} -> {earlier[0]}", flush=True)
        again = replace(request.repeat(read_recipe(definitions[0])), tag=earlier[0].rpartition("@")[2])
        resolved = self._resolve(again)
        if not request.is_dry_run:
            self.stop(stage)
        return self._deploy(self._check(resolved), again, output)

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        return run_one_off(self._config, self._jobs, request, output)

    def run_pipeline(self, request: DeployRequest, output: TextIO | None) -> int:
        """Submit the three jobs, each of which waits in Batch for the one before, and follow them.

        All three deployments are checked before the first is submitted, so that no node is paid for a pipeline whose
        later stage is refused.
        """
        request = replace(request, recipe=request.recipe or read_requested_recipe(DEFAULT_RECIPE))
        checked = [self._check(self._resolve(request.of_pipeline(stage))) for stage in STAGES]
        ended = [*takewhile(lambda each: each.done and not each.present and not request.is_again, checked)]
        for each in checked[len(ended) :]:
            if not each.present:
                self._require_ready(each.resolved)
        job_ids: dict[Stage, str] = {}
        for each in checked:
            stage = each.resolved.deployment.stage
            print(f"\n== {stage}", flush=True)
            self._show(each)
            if each.present:
                print(f"job {each.present.id} already runs this deployment", flush=True)
                job_ids[stage] = each.present.id
            elif each in ended:
                print(f"this deployment already succeeded, {each.done}: nothing is submitted")
            elif request.is_dry_run:
                self._show_dry_run(each.resolved, output)
            else:
                job_ids[stage] = self._submit(each, [*job_ids.values()][-1] if job_ids else "")
        if request.is_dry_run or not request.is_followed:
            return 0
        return self._follow_pipeline(checked, job_ids, request.repetition)

    def _follow_pipeline(self, checked: list[_Checked], job_ids: dict[Stage, str], repetition: str) -> int:
        """Follow the jobs in one view, up to the first that fails: its exit code."""
        price = self._config.trainium.shape.price
        with PipelineView(STAGES, repetition, price.describe_origin() if price else "") as view:
            for each in checked:
                if each.resolved.deployment.stage not in job_ids:
                    view.skip(each.resolved.deployment.stage, f"already succeeded, {each.done}")
            for each in checked:
                stage = each.resolved.deployment.stage
                if stage not in job_ids:
                    continue
                of_node = each.resolved.queue.shape.price
                dollars_per_hour = each.resolved.deployment.nodes * of_node.dollars_per_hour if of_node else None
                look = partial(_show_job, view, dollars_per_hour)
                code = follow(self._jobs, job_ids[stage], take=partial(view.take_line, stage), look=look)
                view.end(stage, code)
                if code:
                    return code
        return 0

    def _resolve(self, request: DeployRequest) -> ResolvedJob:
        return resolve_job(self._config, self._jobs, request)

    def _check(self, resolved: ResolvedJob) -> _Checked:
        jobs, definitions = self._look(resolved.deployment.stage)
        present = _find_present(resolved, jobs, definitions)
        return _Checked(resolved, definitions, present, _describe_done(resolved, definitions))

    def _deploy(self, checked: _Checked, request: DeployRequest, output: TextIO | None) -> int:
        present = checked.present
        if present:
            print(
                f"job {present.id} ({present.status}) already runs this deployment of {request.stage}; following it",
                flush=True,
            )
            return 0 if request.is_dry_run else self._follow(present.id, request)
        self._show(checked)
        if checked.done:
            print(f"this deployment of {request.stage} already succeeded, {checked.done}: nothing is submitted")
            if not request.is_again:
                print("AGAIN=1 submits it again")
                return 0
        self._require_ready(checked.resolved)
        if request.is_dry_run:
            return self._show_dry_run(checked.resolved, output)
        return self._follow(self._submit(checked), request)

    def _look(self, stage: Stage) -> tuple[list[BatchJob], list[Definition]]:
        """Jobs and job definitions of the stage. Definitions of jobs that ended with exit code 0 are tagged first."""
        jobs = self._jobs.find_all(stage)
        good = {job.definition for job in jobs if job.status == "SUCCEEDED"}
        return jobs, [
            self._jobs.note_end(each) if each.arn in good and not each.succeeded_at else each
            for each in self._jobs.definitions(stage)
        ]

    def _show(self, checked: _Checked) -> None:
        print(describe_plan(checked.resolved, next(iter(checked.definitions), None)), flush=True)

    def _show_dry_run(self, resolved: ResolvedJob, output: TextIO | None) -> int:
        if output:
            output.write(f"---\n{write_definition(resolved.body)}")
            output.flush()
        else:
            print(f"\n{describe_definition(resolved.body)}")
        print("\nDRY_RUN=1: nothing was changed")
        return 0

    def _require_ready(self, resolved: ResolvedJob) -> None:
        if problem := self._jobs.explain_queue(resolved.queue.name):
            raise DeviceError(f"{resolved.deployment.stage} is not deployed, nothing was changed: {problem}")

    def _submit(self, checked: _Checked, after: str = "") -> str:
        resolved = checked.resolved
        same = [each for each in checked.definitions if each.deployment == resolved.identity]
        definition = same[0] if same else self._jobs.register(resolved.body)
        stage, recipe = resolved.deployment.stage, resolved.deployment.recipe
        job_id = self._jobs.submit(stage, resolved.queue.name, definition, recipe, after)
        waits = f", after job {after}" if after else ""
        print(
            f"submitted   job {job_id}, {definition.arn.rpartition('/')[2]}, to {resolved.queue.name}{waits}",
            flush=True,
        )
        return job_id

    def _follow(self, job_id: str, request: DeployRequest) -> int:
        return follow(self._jobs, job_id) if request.is_followed else 0

    def _newest(self, stage: Stage) -> BatchJob:
        jobs = self._jobs.find_all(stage)
        if not jobs:
            raise DeviceError(
                f"{stage} has no job that Batch still knows; logs of earlier jobs are in log group "
                f"{self._config.log_groups[stage]}"
            )
        return jobs[0]


def _show_job(view: PipelineView, dollars_per_hour: float | None, job: BatchJob) -> None:
    attempt = f"attempt {len(job.attempts) + 1} of job {job.id}"
    if job.status == "RUNNING":
        view.begin(job.stage, attempt, dollars_per_hour, job.started_at)
    elif job.is_active:
        view.wait(job.stage, f"{attempt} is {job.status.lower()}{f': {job.reason}' if job.reason else ''}")


def _describe_job(job: BatchJob, definition: Definition | None) -> list[str]:
    image = read_container(definition.body)["image"] if definition else "unknown: its job definition is inactive"
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


def _find_present(resolved: ResolvedJob, jobs: list[BatchJob], definitions: list[Definition]) -> BatchJob | None:
    """The job that runs the identical deployment. Raises `DeviceError` where a job runs a different one."""
    stage = resolved.deployment.stage
    active = [job for job in jobs if job.is_active]
    same = {each.arn for each in definitions if each.deployment == resolved.identity}
    others = [job for job in active if job.definition not in same]
    if others:
        raise DeviceError(
            f"{stage} runs as job {others[0].id} since {others[0].created_at:%Y-%m-%dT%H:%MZ} "
            f"({others[0].status}), which is a different deployment. Wait for it (make stage-logs STAGE={stage} "
            f"TARGET=batch) or end it first (make stop-stage STAGE={stage} TARGET=batch)."
        )
    return active[0] if active else None


def _describe_done(resolved: ResolvedJob, definitions: list[Definition]) -> str:
    """The time at which the identical deployment was seen to have succeeded; empty where it was not."""
    ends = [each.succeeded_at for each in definitions if each.deployment == resolved.identity and each.succeeded_at]
    return f"seen at {ends[0]}" if ends else ""
