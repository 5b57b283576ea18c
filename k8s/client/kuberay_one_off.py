"""Runs a subcommand of a stage on KubeRay: in a Job of its own, on a CPU node, followed to its end.

Nothing is created before the checkout is known to have the subcommand. The client deletes the Job at its end. A Job
whose client was interrupted continues, and the same command of the same person follows it again.
"""

from __future__ import annotations

import getpass
import secrets
import sys
import time
from typing import TextIO

from deploy.client.one_off_request import OneOffRequest, prepare_one_off
from deploy.client.requested_recipe import RequestedRecipe, parse_requested_recipe, read_requested_recipe
from k8s.client.deployment_plan import write_documents
from k8s.client.deployment_watch import PodOutput
from k8s.client.pull_watch import PullWatch
from k8s.client.resolved_deployment import START_TIMEOUT_SECONDS, default_recipe_of
from k8s.client.stage_image import choose_image
from k8s.objects.api import Api, ApiUnreachable, Object, is_job_over
from k8s.objects.capacity import check_nodes
from k8s.objects.deploy_job import find_recipe_text
from k8s.objects.names import COMPONENT_LABEL, DEPLOYMENT_LABEL, ONE_OFF, one_off_nodes_name
from k8s.objects.one_off_job import (
    CONTAINER,
    OneOff,
    cpu_group_of,
    describe_words,
    read_end,
    render_one_off_job,
    render_one_off_nodes_job,
)
from k8s.objects.record import read_record
from k8s.objects.worker_group import WorkerGroup, read_cluster, worker_group_of
from services.common.errors import DeviceError, TryAgain
from services.common.recipe.packed_recipe import pack_recipe

POLL_SECONDS = 1.0


class NoStart(DeviceError):
    """No node or no image will come for the one-off, so its Job is deleted."""


def run_one_off(api: Api, request: OneOffRequest, manifests: TextIO | None = None) -> int:
    """Show the plan, create the Jobs and follow them: the subcommand's own exit code. Ctrl-C deletes the Jobs.

    Where an identical request of the same person already has a Job, that Job is followed and none is created.
    """
    one_off, jobs = _resolve(api, request)
    if request.is_dry_run:
        print("\nDRY_RUN=1: nothing was changed")
        if manifests:
            write_documents(manifests, api, jobs)
        return 0
    found = _find(api, one_off.digest)
    name = str(found["metadata"]["name"]) if found else one_off.name
    if found:
        state = "has already run" if is_job_over(found) else "already runs"
        print(f"{name} of {found['metadata']['creationTimestamp']} {state} this request; following it", flush=True)
    try:
        if not found:
            _create(api, name, jobs)
        if request.is_followed:
            return _follow(api, name, request)
    except KeyboardInterrupt:
        api.delete("Job", name)
        print(f"\n{name} is deleted: its pod gets SIGTERM")
        raise
    print(f"{name} continues. The same command without FOLLOW=0 follows it, and Ctrl-C then ends it")
    return 0


def _create(api: Api, name: str, jobs: list[tuple[str, Object]]) -> None:
    """Create the Jobs, all or none: without the Job of its node the one-off would wait for nothing."""
    try:
        for _, job in jobs:
            api.create(job)
    except DeviceError:
        api.delete("Job", name)
        raise


def describe_one_offs(api: Api) -> list[str]:
    """The Jobs of one-offs, one a line."""
    return [
        f"  {job['metadata']['name']}  {'ended, not yet followed' if is_job_over(job) else 'runs'}, since "
        f"{job['metadata']['creationTimestamp']}: {describe_words(job)}"
        for job in api.find_all("Job", f"{COMPONENT_LABEL}={ONE_OFF}")
    ]


def _resolve(api: Api, request: OneOffRequest) -> tuple[OneOff, list[tuple[str, Object]]]:
    """Show the plan. Returns the one-off with its Jobs, each with a comment, in the order of their creation.

    Creates nothing. Raises `RecipeError` for a wrong request, `DeviceError` for one that cannot be served.
    """
    cluster = read_cluster(api)
    group, cpu_group = worker_group_of(cluster, request.stage), cpu_group_of(cluster)
    image = _choose_image(api, group, request.tag)
    prepared = prepare_one_off(request, image, lambda: _find_recipe(api, group))
    one_off = OneOff(
        stage=request.stage,
        id=secrets.token_hex(3),
        digest=prepared.digest,
        image=image,
        words=prepared.words,
        recipe=pack_recipe(prepared.recipe.text.encode()) if prepared.recipe else "",
        seconds=request.seconds,
        user=getpass.getuser(),
        memory_gib=request.memory_gib,
    )
    job = render_one_off_job(group, cpu_group, one_off)
    jobs = [("the client creates it, and deletes it at its end", job)]
    if cpu_group.node_pool:  # created after the other, without which it ends at once
        jobs.append(("it holds the node while the other Job runs", render_one_off_nodes_job(cpu_group, one_off)))
    resources = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    cpus, memory = resources.get("requests", {}).get("cpu"), resources["limits"]["memory"]
    told = {
        "cost": _describe_cost(cpu_group, one_off),
        "nodes": _describe_nodes(api, cpu_group),
        "takes": f"{cpus} CPUs and {memory} of memory on one node (MEMORY=)",
    }
    print("\n".join([*(f"{what:<12s}{text}" for what, text in told.items() if text), *prepared.plan]), flush=True)
    return one_off, jobs


def _choose_image(api: Api, group: WorkerGroup, tag: str) -> str:
    """The image that TAG names; else that of the newest deployment; else the newest that succeeded;
    else that of this checkout.
    """
    if not tag and group.has_image:
        return group.image
    if not tag and group.good_images:
        return group.good_images[-1]
    return choose_image(api, group.name, group.variant, group.container, tag)


def _find_recipe(api: Api, group: WorkerGroup) -> RequestedRecipe:
    """The recipe of the last deployment that its image accepted, with its options; else the overlay's."""
    newest = read_record(api, group.name)
    deployment = newest.accepted if newest else None
    text = find_recipe_text(api, group.name, deployment.recipe_digest) if deployment else None
    if deployment and text:
        recipe = parse_requested_recipe(text, f"that of the {group.name}'s newest deployment")
        return recipe.with_arguments(*deployment.arguments)
    return read_requested_recipe(default_recipe_of(group))


def _describe_cost(cpu_group: WorkerGroup, one_off: OneOff) -> str:
    price, hours = cpu_group.dollars_per_node_hour, one_off.seconds / 3600
    if price is None:
        return ""
    node = cpu_group.instance_type or "a node"
    return f"{node} at ${price:,.2f} an hour: ${price * hours:,.2f} at most, after {hours:g} h (HOURS=)"


def _describe_nodes(api: Api, cpu_group: WorkerGroup) -> str:
    if cpu_group.node_pool:
        return f"node group {cpu_group.node_pool}: one node is added, and removed afterwards"
    lacking = check_nodes(api, cpu_group, 1)
    return f"{lacking}: the Job waits for a node" if lacking else ""


def _find(api: Api, digest: str) -> Object | None:
    """The newest Job of an identical request. A Job whose end a client has seen is deleted, so it is not found."""
    found = api.find_all("Job", f"{COMPONENT_LABEL}={ONE_OFF},{DEPLOYMENT_LABEL}={digest}")
    left = [job for job in found if "deletionTimestamp" not in job["metadata"]]
    return max(left, key=lambda job: str(job["metadata"]["creationTimestamp"]), default=None)


def _follow(api: Api, name: str, request: OneOffRequest) -> int:
    """Print the output until the Job has ended, and delete it."""
    nodes = one_off_nodes_name(name)
    jobs = [(name, CONTAINER), *([(nodes, "nodes")] if api.find("Job", nodes) else [])]
    outputs = [PodOutput(api, f"job-name={each}", container, each) for each, container in jobs]
    for output in outputs:
        output.start()
    try:
        job, pods = _await_end(api, name, request)
    except (NoStart, TryAgain):  # other errors, such as a right that is missing for a moment, end no Job
        api.delete("Job", name)
        outputs[-1].finish()
        raise
    outputs[0].finish()
    code, said = read_end(job, pods)
    print(f"{name} ended with exit code {code}{f': {said}' if said else ''}", flush=True)
    api.delete("Job", name, uid=job["metadata"]["uid"])
    return code


def _await_end(api: Api, name: str, request: OneOffRequest) -> tuple[Object, list[Object]]:
    """Wait for the Job's end: the Job and its pods.

    Raises `NoStart` where no node or image will come, and `TryAgain` after the seconds of WAIT.
    """
    seconds = START_TIMEOUT_SECONDS if request.start_timeout_seconds is None else request.start_timeout_seconds
    deadline, pull = time.monotonic() + seconds, PullWatch()
    while True:
        try:
            job, pods = api.find("Job", name), api.find_all("Pod", f"job-name={name}")
            if job is None:
                raise NoStart(f"Job {name} is gone: somebody deleted it. Repeat the command to start again")
            if is_job_over(job):
                return job, pods
            waits = _explain_job(api, job, pods, pull)
            if waits and time.monotonic() > deadline:
                raise TryAgain(f"{name} did not start within {seconds:g} s (WAIT=), and was deleted: {waits}")
        except ApiUnreachable as error:
            print(f"{name}: {error}; the Job continues", file=sys.stderr)
        time.sleep(POLL_SECONDS)


def _explain_job(api: Api, job: Object, pods: list[Object], pull: PullWatch) -> str:
    """Explain what a Job whose pod has not started waits for; empty once it has.

    Raises `NoStart` where no node or image will come.
    """
    if any((pod.get("status") or {}).get("phase") not in (None, "Pending") for pod in pods):
        return ""
    waits, problem = pull.look(api, job["metadata"]["uid"], pods)
    if problem:
        raise NoStart(problem)
    name = str(job["metadata"]["name"])
    nodes_job = api.find("Job", one_off_nodes_name(name))
    if nodes_job and is_job_over(nodes_job):
        raise NoStart(f"{name} gets no node, and was deleted: the output of {one_off_nodes_name(name)} above says why")
    return waits
