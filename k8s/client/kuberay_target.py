"""Deploys a stage on KubeRay, stops it, rolls it back, or runs all three: the commands of a person or of CI.

The client checks the request, shows the plan, creates a deploy Job and follows it. The Job does all the rest, so the
client may be interrupted.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TextIO

from deploy.client.one_off_request import OneOffRequest
from deploy.client.pipeline_view import PipelineView
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from deploy.exit_codes import EXIT_AGAIN
from deploy.good_images import find_image_before
from k8s.client.deployment_plan import describe_plan, write_manifests
from k8s.client.deployment_watch import PRINTING, NotDeployed, Watch, await_acceptance, follow
from k8s.client.kuberay_one_off import run_one_off
from k8s.client.resolved_deployment import complete_request, default_recipe_of, resolve
from k8s.client.stage_preflight import check_cluster
from k8s.client.status import describe_status
from k8s.objects.api import Api, Conflict
from k8s.objects.attempt import nodes_of
from k8s.objects.deploy_job import render_deploy_job, render_recipe_config_map
from k8s.objects.deployment import Deployment
from k8s.objects.lost_pods import LostPods
from k8s.objects.names import STAGE_LABEL, job_name, recipe_name
from k8s.objects.node_group import read_leases
from k8s.objects.record import Outcome, Record, ask_to_stop, end_unanswered, read_record, read_running_record
from k8s.objects.teardown import take_down
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, WorkerGroup, read_worker_group
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.schema import STAGES, Stage

POLL_SECONDS = 1.0
STOP_MARGIN_SECONDS = 300.0
REAP_MINUTES = 10
ORPHAN_SECONDS = 900.0
"""Seconds in which pods of a deployment without a record must end: their grace period is unknown."""


class KubeRayTarget:
    """The RayCluster of a namespace. Its methods are the deploy commands, and return their exit codes.

    With DRY_RUN=1 nothing is changed, and `output` receives what would be applied. A command that is interrupted leaves
    the stage that it watches running; only a one-off is stopped.
    """

    def __init__(self, api: Api) -> None:
        self._api = api

    def deploy(self, request: DeployRequest, output: TextIO | None = None, watch: Watch = PRINTING) -> int:
        """Check the request, show the plan, create the deploy Job and follow it: the stage's exit code.

        An identical deployment that already runs is followed. With FOLLOW=0 or DRY_RUN=1 the exit code is 0.
        """
        group = read_worker_group(self._api, request.stage)
        return self._deploy(group, request, output, watch)

    def _deploy(
        self,
        group: WorkerGroup,
        request: DeployRequest,
        output: TextIO | None,
        watch: Watch = PRINTING,
        *,
        is_replacing: bool = False,
    ) -> int:
        """Deploy. An identical deployment that runs is followed; `is_replacing` stops what runs, after the checks."""
        deployment, recipe = resolve(self._api, group, request)
        running = read_running_record(self._api, request.stage)
        is_ending = running and (running.stop or running.outcome or running.is_deleted)
        if running and not is_ending and not is_replacing:
            return self._attach(running, deployment, request, watch)
        print(describe_plan(group, deployment, recipe.outline), flush=True)
        if problems := check_cluster(self._api, group, deployment, recipe.outline):
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise NotDeployed(f"{group.name} is not deployed, nothing was changed:{lines}")
        if request.is_dry_run:
            print(
                "\nDRY_RUN=1: nothing was changed. A deployment also asks the stage's image whether it accepts the "
                "recipe and finds its artifacts, and EKS whether the node group fits, before nodes are added"
            )
            if output:
                write_manifests(output, self._api, group, deployment, recipe.text)
            return 0
        if running and is_ending:
            print(f"waiting for the previous deployment of {request.stage} to end", flush=True)
            if not _wait_until_over(self._api, running):
                raise DeviceError(
                    f"the previous deployment of {request.stage} does not end: make stop-stage STAGE={request.stage} "
                    f"removes it from this machine"
                )
        elif running:
            if running.acceptance:
                print(
                    f"first the deployment that runs is stopped, then {deployment.image} is asked whether it "
                    f"accepts the recipe. If it refuses, the present one runs again with its RECIPE= and ARGS= by: "
                    f"make deploy-stage STAGE={request.stage} TAG={running.deployment.image}",
                    flush=True,
                )
            self.stop(request.stage)
        self._send(read_worker_group(self._api, request.stage), deployment, recipe.text)
        return self._follow(deployment, request, watch)

    def stop(self, stage: Stage) -> int:
        """Let the stage commit a checkpoint and remove its pods; this client removes them if no deploy Job does."""
        record = read_record(self._api, stage)
        if record and not record.is_over:
            if record.acceptance:
                told = "its driver gets SIGTERM, which the trainer turns into a checkpoint"
                print(f"stopping {stage}: {told}", flush=True)
                with suppress(Conflict):  # the deployment ended in between
                    ask_to_stop(self._api, record, getpass.getuser())
            elif not record.outcome:  # its pod may wait for an image for ever
                try:
                    said = f"stopped by {getpass.getuser()} before its image answered"
                    end_unanswered(self._api, record, Outcome(EXIT_AGAIN, said))
                except Conflict:  # the image has answered in between
                    return self.stop(stage)
            if not _wait_until_over(self._api, record):
                print(f"Job {job_name(stage)} does not answer: this client removes {stage}'s pods instead", flush=True)
                self._api.delete("Job", job_name(stage), uid=record.uid)
        if self._release(stage, record):
            print(f"{stage} stopped: 0 pods, PodGroup deleted")
            for lease in read_leases(self._api):  # this machine needs no AWS account
                if lease.holder == stage:
                    print(f"the reaper scales node group {lease.group} down within {REAP_MINUTES} minutes")
        return 0

    def roll_back(self, request: DeployRequest, output: TextIO | None = None) -> int:
        """Repeat the stage's last deployment with the previous image that succeeded.

        A running deployment is stopped only after the checks of the API have accepted the new one.
        """
        group = read_worker_group(self._api, request.stage)
        record = read_record(self._api, request.stage)
        last = record.accepted if record else None  # what its image has not accepted has run nowhere
        present = last.image if last else group.image
        image = find_image_before(group.good_images, present)
        if image is None:
            known = f"only {present} is known to be good" if group.good_images else "none has succeeded here yet"
            raise DeviceError(
                f"{group.name} cannot go back: {known}. make deploy-stage STAGE={group.name} TAG=... takes any image"
            )
        print(f"rolling {request.stage} back: {present} -> {image}", flush=True)
        again = replace(complete_request(self._api, group, request, last), tag=image)
        return self._deploy(group, again, output, is_replacing=True)

    def run_pipeline(self, request: DeployRequest, output: TextIO | None = None) -> int:
        """Deploy the three stages, one after the other, up to the first that fails."""
        if not request.is_followed:
            raise RecipeError("FOLLOW=0: on KubeRay a pipeline waits for each stage before it starts the next")
        if request.recipe is None:
            default = default_recipe_of(read_worker_group(self._api, STAGES[0]))
            request = replace(request, recipe=read_requested_recipe(default))
        if request.is_dry_run:
            for stage in STAGES:
                print(f"\n== {stage}", flush=True)
                self.deploy(request.of_pipeline(stage), output)
            return 0
        with PipelineView(STAGES, request.repetition, "list prices in the cluster's manifests") as view:
            for stage in STAGES:
                view.wait(stage, "preflight")
                price = read_worker_group(self._api, stage).dollars_per_node_hour
                watch = Watch(partial(view.take_line, stage), partial(_show_deployment, self._api, view, price))
                code = self.deploy(request.of_pipeline(stage), watch=watch)
                view.end(stage, code)
                if code:
                    return code
        return 0

    def show_status(self) -> int:
        print(describe_status(self._api))
        return 0

    def run_one_off(self, request: OneOffRequest, output: TextIO | None) -> int:
        return run_one_off(self._api, request, output)

    def show_log(self, stage: Stage) -> int:
        """Follow the log of a stage that runs, or print the log of its last deploy Job."""
        record = read_record(self._api, stage)
        if record is None:
            raise DeviceError(f"{stage} has no deployment; logs of earlier deployments are in log/{stage} of the root")
        follow(self._api, stage, record.deployment.id)
        return 0

    def _send(self, group: WorkerGroup, deployment: Deployment, recipe_text: str) -> None:
        """Create the recipe's ConfigMap and the deploy Job, whose name is fixed: of two clients only one succeeds."""
        with suppress(Conflict):  # the name holds the content's digest
            self._api.create(render_recipe_config_map(group.name, recipe_text, deployment.recipe_digest))
        before = read_record(self._api, group.name)
        if before and before.is_over:
            self._api.delete("Job", job_name(group.name), uid=before.uid)
            _wait_until_over(self._api, before, read_record)
        last = before.accepted if before else None
        try:
            self._api.create(render_deploy_job(group, deployment, last))
        except Conflict as error:
            raise DeviceError(
                f"somebody else started to deploy {group.name} at the same time: make stage-status shows the "
                f"deployment, and repeating this command follows it if it is identical"
            ) from error
        _forget_recipes(self._api, group, deployment, last)

    def _attach(self, running: Record, deployment: Deployment, request: DeployRequest, watch: Watch) -> int:
        differences = running.deployment.differences(deployment)
        if differences:
            raise NotDeployed(
                f"{running.deployment.user} has deployed {request.stage} since {running.created_at}, and your "
                f"deployment differs: {'; '.join(differences)}. Wait for it (make stage-logs STAGE={request.stage}) or "
                f"end it first (make stop-stage STAGE={request.stage})."
            )
        print(f"{request.stage} already runs this deployment since {running.created_at}; following it", flush=True)
        return 0 if request.is_dry_run else self._follow(running.deployment, request, watch)

    def _follow(self, deployment: Deployment, request: DeployRequest, watch: Watch) -> int:
        try:
            for artifact in await_acceptance(self._api, deployment).upstream:
                print(f"reads       {artifact}", flush=True)
            if not request.is_followed:
                print(f"{deployment.stage} is being deployed; make stage-logs STAGE={deployment.stage} follows it")
                return 0
            return follow(self._api, deployment.stage, deployment.id, watch)
        except KeyboardInterrupt:
            print(
                f"\n{deployment.stage} continues to run: make stage-logs STAGE={deployment.stage} follows it again, "
                f"make stop-stage STAGE={deployment.stage} ends it"
            )
            raise

    def _release(self, stage: str, record: Record | None) -> bool:
        """Remove pods that no deploy Job holds any more. False if somebody else deployed the stage meanwhile."""
        deadline = time.monotonic() + (_patience(record) if record else ORPHAN_SECONDS)
        lost = LostPods(self._api, stage, lambda text: print(text, flush=True))
        while True:
            running = read_running_record(self._api, stage)
            if running and (record is None or running.uid != record.uid):
                print(f"{running.deployment.user} has deployed {stage} again meanwhile: that deployment is not touched")
                return False
            try:
                lost.remove(is_idle=True)
                left = take_down(self._api, stage)
            except Conflict:
                left = 1  # the operator changed an object in between
            if left == 0:
                return True
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{stage} did not end in time: kubectl -n {self._api.namespace} get pods,rayjobs -o wide shows the "
                    f"objects that are left. Does the KubeRay operator run?"
                )
            time.sleep(POLL_SECONDS)


def _show_deployment(api: Api, view: PipelineView, dollars_per_node_hour: float | None, record: Record) -> None:
    """Show whether the deployment's attempt has its pods. Its cost counts from the start of the attempt's RayJob.

    After the last attempt the stage is shown as before, until its pods have left.
    """
    if record.outcome or (record.attempts and record.attempts[-1].exit_code != EXIT_AGAIN):
        return
    deployment, number = record.deployment, len(record.attempts) + 1
    job = api.find("RayJob", deployment.rayjob_name(number))
    if job is None:
        view.wait(deployment.stage, f"attempt {number}: its pods are being placed")
        return
    nodes, started = nodes_of(job), (job.get("status") or {}).get("startTime")
    dollars_per_hour = None if dollars_per_node_hour is None else nodes * dollars_per_node_hour
    since = datetime.fromisoformat(started) if started else None
    view.begin(
        deployment.stage, f"attempt {number} on {nodes:,} node{'' if nodes == 1 else 's'}", dollars_per_hour, since
    )


def _forget_recipes(api: Api, group: WorkerGroup, deployment: Deployment, before: Deployment | None) -> None:
    """Delete ConfigMaps of older recipes, which the namespace's quota counts, except those that the group's pod
    template and a rollback still need.
    """
    kept = {recipe_name(group.name, each.recipe_digest) for each in (deployment, before) if each} | {group.recipe}
    for recipe in api.find_all("ConfigMap", f"{STAGE_LABEL}={group.name}"):
        if recipe["metadata"]["name"] not in kept:
            api.delete("ConfigMap", recipe["metadata"]["name"])


def _wait_until_over(api: Api, record: Record, read: Callable[[Api, str], Record | None] = read_running_record) -> bool:
    """Wait until `read` finds the deployment no more. False if that takes longer than a stage may take to stop."""
    deadline = time.monotonic() + (_patience(record) if record.acceptance else STOP_MARGIN_SECONDS)
    while time.monotonic() < deadline:
        now = read(api, record.deployment.stage)
        if now is None or now.uid != record.uid:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _patience(record: Record) -> float:
    """Seconds in which a deployment must end: the driver's grace period, then the pods', and a margin."""
    return 2 * (record.deployment.drain_seconds + DRAIN_MARGIN_SECONDS) + STOP_MARGIN_SECONDS
