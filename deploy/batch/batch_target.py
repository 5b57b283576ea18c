"""Deploys stages on AWS Batch. Batch itself keeps, retries and ends a job, so that no client has to stay connected."""

from __future__ import annotations

import getpass
import json
import time
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from deploy.batch.config import CONFIG, Config, read_config
from deploy.batch.jobs import POLL_SECONDS, BatchJob, Definition, Jobs, follow
from deploy.batch.resolved_job import DEFAULT_RECIPE, ResolvedJob, read_recipe, resolve_job, resolve_one_off
from deploy.client.one_off_request import OneOffRequest
from deploy.client.pipeline_view import PipelineView
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from deploy.exit_codes import EXIT_AGAIN
from deploy.progress import print_line
from infra.account.session import Account
from infra.shapes import Price
from services.common.errors import DeviceError, LimitError
from services.common.recipe.schema import STAGES, Stage

STOP_SECONDS = 900.0
"""Shortest time, in seconds, that a job is given to end."""
STOP_MARGIN_SECONDS = 300.0
"""Seconds added to the machines' grace period, in which Batch reports that the job has ended."""


def connect_batch(path: Path | None = None) -> BatchTarget:
    """Raises `RecipeError` without a config.txt."""
    config = read_config(path or CONFIG)
    return BatchTarget(config, Jobs(Account(config.region), config))


class BatchTarget:
    """The job queues of a `config.txt`. Its methods are those of `k8s.client.kuberay_target.KubeRayTarget`."""

    def __init__(self, config: Config, jobs: Jobs) -> None:
        self._config, self._jobs = config, jobs

    def deploy(self, request: DeployRequest, output: TextIO | None) -> int:
        """Deploy the stage, unless the identical deployment runs, or has succeeded and AGAIN=1 is not given."""
        return self._deploy(self._check(resolve_job(self._config, self._jobs, request)), request, output)

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
            if good := next((each for each in definitions if each.succeeded_at), None):
                print(f"  good      {good.container['image']}, {good.succeeded_at}")
        return 0

    def show_log(self, stage: Stage) -> int:
        jobs = self._jobs.find_all(stage)
        if not jobs:
            raise DeviceError(
                f"{stage} has no job that Batch still knows; logs of earlier jobs are in log group "
                f"{self._config.log_groups[stage]}"
            )
        follow(self._jobs, jobs[0].id, is_log_whole=True)
        return 0

    def stop(self, stage: Stage) -> int:
        """End the stage's jobs. A job that waits for nodes ends at once; a running trainer commits a checkpoint."""
        active = [job for job in self._jobs.find_all(stage) if job.is_active]
        for job in active:
            print_line(f"stopping {stage}, job {job.id}: its main node gets SIGTERM")
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
        """Repeat the stage's newest deployment with the newest other image that succeeded."""
        stage = request.stage
        _, definitions = self._look(stage)
        if not definitions:
            raise DeviceError(f"{stage} has no deployment here yet: make deploy-stage STAGE={stage} TARGET=batch")
        present = definitions[0].container["image"]
        good = [each.container["image"] for each in definitions[1:] if each.succeeded_at]
        image = next((each for each in good if each != present), "")
        if not image:
            raise DeviceError(
                f"no earlier image of {stage} than {present} is known to have succeeded: make deploy-stage "
                f"STAGE={stage} TAG= deploys one that you name"
            )
        print_line(f"rolling {stage} back: {present} -> {image}")
        again = replace(request.repeat(read_recipe(definitions[0])), tag=image.rpartition("@")[2])
        resolved = resolve_job(self._config, self._jobs, again)
        if not request.is_dry_run:
            self.stop(stage)
        return self._deploy(self._check(resolved), again, output)

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        """Submit a job of the subcommand and follow it: the subcommand's own exit code. Ctrl-C ends the job.

        Where an identical request of the same person already runs, its job is followed and none is submitted.
        """
        checked = self._check(resolve_one_off(self._config, self._jobs, request))
        job_ids = self._submit([checked], output, is_dry_run=request.is_dry_run)
        if request.is_dry_run:
            return 0
        job_id = job_ids[request.stage]
        if not request.is_followed:
            print(f"job {job_id} continues. The same command without FOLLOW=0 follows it, and Ctrl-C then ends it")
            return 0
        try:
            job = follow(self._jobs, job_id)
        except KeyboardInterrupt:
            if found := self._jobs.find(job_id):
                self._jobs.terminate(found, f"Ctrl-C in make stage-run, {getpass.getuser()}")
            print(f"\njob {job_id} is terminated: its container gets SIGTERM")
            raise
        if "OutOfMemory" in job.reason:
            return LimitError.exit_code
        return job.exit_code if job.exit_code <= 128 else EXIT_AGAIN  # a signal: the limit of time, or a lost host

    def run_pipeline(self, request: DeployRequest, output: TextIO | None) -> int:
        """Submit the three jobs, each of which waits in Batch for the one before, and follow them.

        All three deployments are checked before the first is submitted, so that no node is paid for a pipeline whose
        later stage is refused.
        """
        request = replace(request, recipe=request.recipe or read_requested_recipe(DEFAULT_RECIPE))
        checked = [self._check(resolve_job(self._config, self._jobs, request.of_pipeline(stage))) for stage in STAGES]
        job_ids = self._submit(checked, output, is_dry_run=request.is_dry_run, is_again=request.is_again)
        if request.is_dry_run or not request.is_followed:
            return 0
        price = self._config.trainium.shape.price
        with PipelineView(STAGES, request.repetition, price.describe_origin() if price else "") as view:
            for each in checked:
                if each.stage not in job_ids:
                    view.skip(each.stage, f"already succeeded, seen at {each.done}")
            prices = {each.stage: each.queue.shape.price for each in checked}
            for stage, job_id in job_ids.items():
                look = partial(_show_job, view, prices[stage])
                job = follow(self._jobs, job_id, take=partial(view.take_line, stage), look=look)
                view.end(stage, job.exit_code)
                if job.exit_code:
                    return job.exit_code
        return 0

    def _look(self, stage: Stage, *, of_one_offs: bool = False) -> tuple[list[BatchJob], list[Definition]]:
        """Jobs and job definitions. Those of deployments that ended with exit code 0 are tagged first."""
        jobs = self._jobs.find_all(stage, of_one_offs=of_one_offs)
        good = {job.definition for job in jobs if job.status == "SUCCEEDED" and not of_one_offs}
        return jobs, [
            self._jobs.note_end(each) if each.arn in good and not each.succeeded_at else each
            for each in self._jobs.definitions(stage, of_one_offs=of_one_offs)
        ]

    def _check(self, resolved: ResolvedJob) -> ResolvedJob:
        """The job, compared with those of its stage. Raises `DeviceError` where one runs a different deployment."""
        stage, is_one_off = resolved.spec.stage, resolved.spec.is_one_off
        jobs, definitions = self._look(stage, of_one_offs=is_one_off)
        same = [each for each in definitions if each.deployment == resolved.identity]
        active = [job for job in jobs if job.is_active]
        present = [job for job in active if job.definition in {each.arn for each in same}]
        if other := next((job for job in active if job not in present and not is_one_off), None):
            raise DeviceError(
                f"{stage} runs as job {other.id} since {other.created_at:%Y-%m-%dT%H:%MZ} ({other.status}), which is a "
                f"different deployment. Wait for it (make stage-logs STAGE={stage} TARGET=batch) or end it first (make "
                f"stop-stage STAGE={stage} TARGET=batch)."
            )
        return replace(
            resolved,
            same=next(iter(same), None),
            present=next(iter(present), None),
            done=next((each.succeeded_at for each in same if each.succeeded_at), ""),
        )

    def _deploy(self, checked: ResolvedJob, request: DeployRequest, output: TextIO | None) -> int:
        job_ids = self._submit([checked], output, is_dry_run=request.is_dry_run, is_again=request.is_again)
        if request.is_dry_run or not request.is_followed or not job_ids:
            return 0
        return follow(self._jobs, job_ids[checked.stage]).exit_code

    def _submit(
        self, checked: list[ResolvedJob], output: TextIO | None, *, is_dry_run: bool, is_again: bool = False
    ) -> dict[Stage, str]:
        """Show the plans and submit the jobs, each of which waits for the one before: their ids, by stage.

        No job is submitted for what already runs, and for the first stages that have succeeded unless `is_again`. A dry
        run submits none.
        """
        done = [*takewhile(lambda each: each.done and not each.present and not is_again, checked)]
        job_ids: dict[Stage, str] = {}
        for each in checked:
            name = " ".join([each.stage, *each.spec.words[:1]])  # of a one-off with its subcommand
            print(f"{'== ' if len(checked) > 1 else ''}{name}\n{each.plan}", flush=True)
            if each.present:
                print_line(f"job {each.present.id} ({each.present.state}) already runs it")
                job_ids[each.stage] = each.present.id
            elif each in done:
                print_line(f"it already succeeded, seen at {each.done}: nothing is submitted. AGAIN=1 submits it again")
            elif is_dry_run and output:  # JSON is YAML as well
                print(f"---\n{json.dumps(each.body, indent=2)}", file=output, flush=True)
            elif not is_dry_run:
                after = next(reversed(job_ids.values()), "")
                job_ids[each.stage] = self._jobs.submit(each.spec, each.queue.name, each.body, each.same, after)
        if is_dry_run:
            print("\nDRY_RUN=1: nothing was changed")
        return job_ids


def _show_job(view: PipelineView, price: Price | None, job: BatchJob) -> None:
    attempt = f"attempt {len(job.attempts) + 1} of job {job.id}"
    if job.status == "RUNNING":
        view.begin(job.stage, attempt, job.nodes * price.dollars_per_hour if price else None, job.started_at)
    elif job.is_active:
        view.wait(job.stage, f"{attempt} is {job.state}")


def _describe_job(job: BatchJob, definition: Definition | None) -> list[str]:
    reason = f": {job.reason}" if job.reason else ""
    return [
        f"image     {definition.container['image'] if definition else 'unknown: its job definition is inactive'}",
        f"job       {job.id}, {job.nodes} nodes, since {job.created_at:%Y-%m-%dT%H:%M:%SZ}",
        *(
            f"attempt   {number} ended with {'no exit code' if code is None else f'exit code {code}'}"
            for number, code in enumerate(job.attempts, start=1)
        ),
        f"now       {job.state}" if job.is_active else f"outcome   exit code {job.exit_code}{reason}",
    ]
