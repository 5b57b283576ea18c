"""The commands of a person or of CI: deploy a stage, stop it, go back, run all three.

Everything that lasts happens in the deploy Job; a client only checks, shows, asks and watches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

from deploy.client.request import DeployRequest, user_name
from deploy.history import find_image_before
from k8s.client.manifests import write_manifests
from k8s.client.plan import describe_plan
from k8s.client.preflight import Problem, check_cluster, check_in_pods
from k8s.client.reaper_job import start_reaper
from k8s.client.request import ResolvedRequest, complete_from_record, resolve
from k8s.client.watch import follow
from k8s.objects.api import Api, Conflict
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import Deployment
from k8s.objects.lost_pods import LostPods
from k8s.objects.names import STAGE_LABEL, job_name, lease_name, recipe_name
from k8s.objects.node_shares import read_share_book
from k8s.objects.recipe import render_recipe_config_map
from k8s.objects.record import Record, ask_to_stop, read_record, read_running_record
from k8s.objects.teardown import release_pods, stop_rayjobs
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, WorkerGroup, read_worker_group
from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError
from services.common.recipe.schema import STAGES

POLL_SECONDS = 1.0
STOP_MARGIN_SECONDS = 300.0
REAP_MINUTES = 5
ORPHAN_SECONDS = 900.0  # for pods whose notice is not known any more


class NotDeployed(MillraceError):
    """Preflight found reasons not to."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def deploy_stage(api: Api, request: DeployRequest, manifests: TextIO | None = None) -> int:
    """Preflight, diff, deploy Job, follow. A stage that is being deployed just so is followed, not deployed again.

    Returns the stage's exit code, or 0 at once with FOLLOW=0 or DRY_RUN=1, which writes what would be applied.
    """
    group = read_worker_group(api, request.stage)
    resolved = resolve(api, group, request)
    running = read_running_record(api, request.stage)
    if running and (running.stop or running.outcome or running.is_deleted):
        print(f"waiting for the deployment of {request.stage} before to go down", flush=True)
        if not _wait_until_over(api, running):
            raise DeviceError(f"it does not go down: make stop-stage STAGE={request.stage} takes it down from here")
        group = read_worker_group(api, request.stage)
    elif running:
        return _attach(api, running, resolved.deployment, request)
    deployment = _check(api, group, resolved)
    if request.is_dry_run:
        print("\nDRY_RUN=1: nothing was changed")
        if manifests:
            write_manifests(manifests, api, group, deployment, resolved.recipe_text)
        return 0
    _send(api, group, deployment, resolved.recipe_text)
    return _follow(api, deployment, request)


def stop_stage(api: Api, stage: str) -> int:
    """Let the stage commit a checkpoint and take it down; where no deploy Job does it, take it down from here."""
    record = read_record(api, stage)
    if record and not record.is_over:
        print(f"stopping {stage}: its driver gets SIGTERM, which the trainer turns into a checkpoint", flush=True)
        with suppress(Conflict):  # it ended in between
            ask_to_stop(api, record, user_name())
        if not _wait_until_over(api, record):
            print(f"Job {job_name(stage)} does not answer: taking {stage} down from here", flush=True)
            api.delete("Job", job_name(stage), uid=record.uid)
    if _release(api, stage, record):
        print(f"{stage} is down: no pods, no gang")
        _give_back(api, stage)
    return 0


def _give_back(api: Api, stage: str) -> None:
    """Nodes that no deploy Job gives back the reaper does, who may: this machine needs no AWS account."""
    pools = read_share_book(api).pools_of(stage)
    if not pools:
        return
    when = f"within {REAP_MINUTES} minutes" if start_reaper(api) else "within half an hour"
    print(f"the nodes that it held of node group {', '.join(pools)} go {when}: the reaper lowers it")


def rollback_stage(api: Api, request: DeployRequest, manifests: TextIO | None = None) -> int:
    """Deploy the stage as it was deployed last, with the image before, of those with which it ended well.

    What runs is stopped once the other is known to be able to run.
    """
    group = read_worker_group(api, request.stage)
    record = read_record(api, request.stage)
    present = record.deployment.image if record else group.image
    image = _image_before(group, present)
    print(f"rolling {request.stage} back: {present} -> {image}", flush=True)
    again = replace(complete_from_record(api, group, request, record), tag=image)
    if record and not record.is_over:
        resolved = resolve(api, group, again)
        deployment = _check(api, group, resolved)
        if request.is_dry_run:
            print(f"\nDRY_RUN=1: nothing was changed; {request.stage} would be stopped first")
            if manifests:
                write_manifests(manifests, api, group, deployment, resolved.recipe_text)
            return 0
        stop_stage(api, request.stage)
    return deploy_stage(api, again, manifests)


def run_pipeline(api: Api, request: DeployRequest, manifests: TextIO | None = None) -> int:
    """The three stages, one after the other; stops at the first that fails."""
    if not request.is_followed:
        raise RecipeError("FOLLOW=0: on KubeRay a pipeline waits for each stage before it begins the next")
    for stage in STAGES:
        print(f"\n== {stage}", flush=True)
        try:
            code = deploy_stage(api, replace(request, stage=stage), manifests)
        except NotDeployed as error:
            if not (request.is_dry_run and error.exit_code == ArtifactError.exit_code and stage != STAGES[0]):
                raise
            print(f"{error}\nwhich the stages before may bring")
            code = 0
        if code != 0:
            return code
    return 0


def show_log(api: Api, stage_name: str) -> int:
    """Follow a stage that is deployed; of one that ended, print what its Job said."""
    record = read_record(api, stage_name)
    if record is None:
        raise DeviceError(
            f"{stage_name} has no deployment; the logs of earlier ones are in log/{stage_name} of the root"
        )
    follow(api, stage_name, record.deployment.id)
    return 0


def _check(api: Api, group: WorkerGroup, resolved: ResolvedRequest) -> Deployment:
    """Show the plan; the deployment, completed by what was seen. Raises `NotDeployed` with every problem found."""
    deployment = resolved.deployment
    print(describe_plan(group, deployment, resolved.outline), flush=True)
    problems = check_cluster(api, group, deployment, resolved.outline)
    if not problems:  # short pods need the claim and the account that were just looked for
        found = check_in_pods(api, group, deployment, resolved.recipe_text)
        problems = found.problems
        deployment = replace(deployment, ray_version=found.ray_version)
        for artifact in found.upstream:
            print(f"reads       {artifact['schema']} {artifact['name']}/{artifact['id']}", flush=True)
    if problems:
        raise NotDeployed(_listed(group.name, problems), max(problem.exit_code for problem in problems))
    return deployment


def _listed(stage: str, problems: list[Problem]) -> str:
    lines = "".join(f"\n  - {problem.text}" for problem in problems)
    return f"{stage} is not deployed, nothing was changed:{lines}"


def _send(api: Api, group: WorkerGroup, deployment: Deployment, recipe_text: str) -> None:
    """Create recipe and Job. The Job's fixed name makes the API server the judge between two clients."""
    with suppress(Conflict):  # its name says its content
        api.create(render_recipe_config_map(group.name, recipe_text, deployment.recipe_digest))
    before = read_record(api, group.name)
    if before and before.is_over:
        api.delete("Job", job_name(group.name), uid=before.uid)
        _wait_until_gone(api, before)
    try:
        api.create(render_deploy_job(group, deployment))
    except Conflict as error:
        raise DeviceError(
            f"somebody else began to deploy {group.name} at this moment: make stage-status shows what; "
            f"the same command follows it when it is the same"
        ) from error
    _forget_recipes(api, group, deployment, before)


def _attach(api: Api, running: Record, deployment: Deployment, request: DeployRequest) -> int:
    differences = running.deployment.differences(deployment)
    if differences:
        raise NotDeployed(
            f"{request.stage} is being deployed by {running.deployment.user} since {running.created_at}, and you ask "
            f"for another: {'; '.join(differences)}. Wait for it (make stage-logs STAGE={request.stage}) or end it "
            f"first (make stop-stage STAGE={request.stage}).",
            DeviceError.exit_code,
        )
    print(f"{request.stage} is being deployed just so since {running.created_at}: following it", flush=True)
    return 0 if request.is_dry_run else _follow(api, running.deployment, request)


def _follow(api: Api, deployment: Deployment, request: DeployRequest) -> int:
    if not request.is_followed:
        print(f"{deployment.stage} is being deployed; make stage-logs STAGE={deployment.stage} follows it")
        return 0
    try:
        return follow(api, deployment.stage, deployment.id)
    except KeyboardInterrupt:
        print(
            f"\n{deployment.stage} goes on without you: make stage-logs STAGE={deployment.stage} follows it again, "
            f"make stop-stage STAGE={deployment.stage} ends it"
        )
        raise


def _image_before(group: WorkerGroup, present: str) -> str:
    image = find_image_before(group.good_images, present)
    if image is None:
        known = f"only {present} is known to be good" if group.good_images else "no image of it has ended well here yet"
        raise DeviceError(
            f"{group.name} cannot go back: {known}. make deploy-stage STAGE={group.name} TAG=... takes any"
        )
    return image


def _forget_recipes(api: Api, group: WorkerGroup, deployment: Deployment, before: Record | None) -> None:
    """Remove recipes of older deployments; a pod template names one until it is changed, a rollback takes the last."""
    digests = {each.recipe_digest for each in (deployment, before.deployment if before else None) if each}
    kept = {recipe_name(group.name, digest) for digest in digests} | {group.recipe}
    for recipe in api.find_all("ConfigMap", f"{STAGE_LABEL}={group.name}"):
        if recipe["metadata"]["name"] not in kept:
            api.delete("ConfigMap", recipe["metadata"]["name"])


def _release(api: Api, stage: str, record: Record | None) -> bool:
    """Take down what no deploy Job holds any more; False when somebody deployed the stage anew meanwhile."""
    deadline = time.monotonic() + (_patience(record) if record else ORPHAN_SECONDS)
    lost = LostPods(api, stage, lambda text: print(text, flush=True))
    while True:
        running = read_running_record(api, stage)
        if running and (record is None or running.uid != record.uid):
            print(f"{stage} was deployed anew by {running.deployment.user}: that one is left alone")
            return False
        try:
            lost.remove(is_idle=True)
            left = stop_rayjobs(api, stage) or release_pods(api, stage)
        except Conflict:
            left = 1  # the operator wrote in between
        if left == 0:
            api.delete("Lease", lease_name(stage))
            return True
        if time.monotonic() > deadline:
            raise DeviceError(
                f"{stage} does not go down: kubectl -n {api.namespace} get pods,rayjobs -o wide shows what is left. "
                f"Does the KubeRay operator run?"
            )
        time.sleep(POLL_SECONDS)


def _wait_until_over(api: Api, record: Record) -> bool:
    """False when the Job goes on longer than a stage may take to stop."""
    return _wait_for_end(record, lambda: read_running_record(api, record.deployment.stage), _patience(record))


def _wait_until_gone(api: Api, record: Record) -> bool:
    """False when the Job that was deleted is still there."""
    return _wait_for_end(record, lambda: read_record(api, record.deployment.stage), STOP_MARGIN_SECONDS)


def _wait_for_end(record: Record, read: Callable[[], Record | None], seconds: float) -> bool:
    """Until what is read is this record's no more; False when that takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = read()
        if now is None or now.uid != record.uid:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _patience(record: Record) -> float:
    """A notice to the driver, then one to the pods."""
    return 2 * (record.deployment.drain_seconds + DRAIN_MARGIN_SECONDS) + STOP_MARGIN_SECONDS
