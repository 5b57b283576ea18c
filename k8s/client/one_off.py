"""One-offs on KubeRay: a subcommand of a stage in a Job of its own, on a CPU node, followed to its end.

Nothing is created before the image is known to have the subcommand. A Job whose end was seen is deleted; one whose
client went away goes on, and the same command of the same person finds it again.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

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
from deploy.client.request import DEFAULT_RECIPE, user_name
from k8s.client.manifests import write_documents
from k8s.client.pull_watch import PullWatch, explain_wait
from k8s.client.stage_image import choose_image, find_image_labels
from k8s.client.watch import PodOutput
from k8s.objects.api import Api, ApiUnreachable, Object
from k8s.objects.capacity import check_nodes
from k8s.objects.deployment import UPDATE_HEAD
from k8s.objects.names import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    ONE_OFF,
    OUTCOME_ANNOTATION,
    one_off_nodes_name,
)
from k8s.objects.one_off_job import (
    CONTAINER,
    OneOff,
    cpu_group_of,
    describe_words,
    is_over,
    read_end,
    render_one_off_job,
    render_one_off_nodes_job,
)
from k8s.objects.placement import newest_event
from k8s.objects.recipe import find_recipe_text
from k8s.objects.record import Outcome, read_record
from k8s.objects.worker_group import WorkerGroup, image_of, read_cluster, worker_group_of
from services.common.errors import DeviceError, MillraceError, TryAgain
from services.common.launch.batch.node import pack_recipe

POLL_SECONDS = 1.0
LAST_FILES_SECONDS = 120.0
LEAVE_SECONDS = 120.0
"""Seconds after which a pod that is to leave is removed by force: its node is lost."""


class NoNode(MillraceError):
    """The Job that was to bring a one-off's node gave up."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Prepared:
    """A one-off that nothing speaks against."""

    one_off: OneOff
    job: Object
    nodes_job: Object | None
    """None where nodes are simply there."""
    plan: str


def run_one_off(api: Api, request: OneOffRequest, manifests: TextIO | None = None) -> int:
    """Show the plan, create the Jobs, follow: the subcommand's own exit code. Ctrl-C deletes them.

    The same that this person has asked for, and whose end nobody has seen, is followed in place of a second one.
    """
    prepared = _prepare(api, request)
    print(prepared.plan, flush=True)
    if request.is_dry_run:
        print("\nDRY_RUN=1: nothing was changed")
        if manifests:
            write_documents(manifests, api, _documents(prepared))
        return 0
    found = _find(api, prepared.one_off.digest)
    name = str(found["metadata"]["name"]) if found else prepared.one_off.name
    if found:
        went = "has ended, which nobody saw" if is_over(found) else "goes on"
        print(
            f"{name} of {found['metadata']['creationTimestamp']} is just the same, and {went}: following it", flush=True
        )
    try:
        if not found:
            _submit(api, prepared)
        if request.is_followed:
            return _follow(api, name, request)
    except KeyboardInterrupt:
        api.delete("Job", name)
        print(f"\n{name} is deleted: its pod gets SIGTERM")
        raise
    print(f"{name} goes on: the same command without FOLLOW=0 shows it, and Ctrl-C ends it then")
    return 0


def describe_one_offs(api: Api) -> list[str]:
    """A line for each one-off that there is."""
    return [
        f"  {job['metadata']['name']}  {'ended, unseen' if is_over(job) else 'goes on'}, since "
        f"{job['metadata']['creationTimestamp']}: {describe_words(job)}"
        for job in api.find_all("Job", f"{COMPONENT_LABEL}={ONE_OFF}")
    ]


def _prepare(api: Api, request: OneOffRequest) -> _Prepared:
    """Raises `RecipeError` and `DeviceError` for what cannot be; nothing is created."""
    cluster = read_cluster(api)
    group, cpu_group = worker_group_of(cluster, request.stage), cpu_group_of(cluster)
    image = _choose_image(api, group, request.tag)
    labels = find_image_labels(group, image)
    require_known(request, image, labels)
    recipe = _choose_recipe(api, group, request) if needs_recipe(request) else None
    words = complete_words(request, recipe)
    one_off = OneOff(
        stage=request.stage,
        id=secrets.token_hex(3),
        digest=identify(request, image, words, recipe),
        image=image,
        words=words,
        bring=request.bring,
        recipe=pack_recipe(recipe.text.encode()) if recipe else "",
        seconds=request.seconds,
        user=user_name(),
        memory_gib=request.memory_gib,
    )
    job = render_one_off_job(group, cpu_group, one_off)
    nodes_job = render_one_off_nodes_job(cpu_group, one_off) if cpu_group.node_pool else None
    plan = [*_describe(api, cpu_group, one_off, job, recipe), describe_judge(labels)]
    return _Prepared(one_off, job, nodes_job, "\n".join(filter(None, plan)))


def _choose_image(api: Api, group: WorkerGroup, tag: str) -> str:
    """The image that TAG names; else that of the newest deployment, the newest with which the stage ended well, or the
    working tree's."""
    if tag:
        return choose_image(api, group.name, group.variant, group.container, tag)
    if group.has_image:
        return group.image
    if group.good_images:
        return group.good_images[-1]
    return choose_image(api, group.name, group.variant, group.container, "")


def _choose_recipe(api: Api, group: WorkerGroup, request: OneOffRequest) -> OneOffRecipe:
    """The recipe that RECIPE names; else that of the stage's newest deployment with its overrides, or the overlay's."""
    if request.recipe:
        return read_named_recipe(request.recipe)
    record = read_record(api, group.name)
    text = find_recipe_text(api, group.name, record.deployment.recipe_digest) if record else None
    if record and text:
        overrides = only_overrides(record.deployment.arguments)
        return OneOffRecipe(text, overrides, f"that of the {group.name}'s newest deployment")
    return read_named_recipe(Path(group.default_recipe or DEFAULT_RECIPE))


def _describe(api: Api, cpu_group: WorkerGroup, one_off: OneOff, job: Object, recipe: OneOffRecipe | None) -> list[str]:
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    requests = limits.get("requests", {})
    price, hours = cpu_group.dollars_per_node_hour, one_off.seconds / 3600
    lines = []
    if price is not None:
        node = cpu_group.instance_type or "a node"
        lines.append(
            f"cost        {node} at ${price:,.2f} an hour: ${price * hours:,.2f} at most, after {hours:g} h (HOURS=)"
        )
    if cpu_group.node_pool:
        lines.append(f"nodes       node group {cpu_group.node_pool}: one node comes for it and goes after it")
    elif lacking := check_nodes(api, cpu_group, 1):
        lines.append(f"nodes       {lacking}: it waits for one")
    lines += [
        f"runs        {one_off.stage}: {shlex.join(one_off.words)}",
        f"image       {one_off.image}",
        f"recipe      {recipe.described if recipe else 'none: the subcommand takes none'}",
        f"takes       {requests.get('cpu')} CPUs and {limits['limits']['memory']} of memory on one node (MEMORY=)",
    ]
    if one_off.bring:
        lines.append(f"brings      {' '.join(one_off.bring)}")
    return lines


def _documents(prepared: _Prepared) -> list[tuple[str, Object]]:
    nodes = [("it holds the node for as long as the other goes on", prepared.nodes_job)] if prepared.nodes_job else []
    return [*nodes, ("the client creates it, and deletes it when its end was seen", prepared.job)]


def _find(api: Api, digest: str) -> Object | None:
    """The newest Job of the same request whose end nobody has seen: what was seen is deleted."""
    found = api.find_all("Job", f"{COMPONENT_LABEL}={ONE_OFF},{DEPLOYMENT_LABEL}={digest}")
    left = [job for job in found if "deletionTimestamp" not in job["metadata"]]
    return max(left, key=lambda job: str(job["metadata"]["creationTimestamp"]), default=None)


def _submit(api: Api, prepared: _Prepared) -> None:
    """The Job that brings the node first: it waits for the other, and not the other way round."""
    if prepared.nodes_job:
        api.create(prepared.nodes_job)
    try:
        api.create(prepared.job)
    except MillraceError:
        if prepared.nodes_job:
            api.delete("Job", prepared.nodes_job["metadata"]["name"])
        raise


def _follow(api: Api, name: str, request: OneOffRequest) -> int:
    """Print the output until the Job has ended, take what it brings, and delete it."""
    reception = Reception(request, name)
    output = PodOutput(api, f"job-name={name}", CONTAINER, name, reception.take)
    output.start()
    if api.find("Job", one_off_nodes_name(name)):
        PodOutput(api, f"job-name={one_off_nodes_name(name)}", "nodes", f"node of {name}").start()
    job, pods = _await_end(api, name, request)
    output.finish(LAST_FILES_SECONDS)
    code, said = read_end(job, pods)
    print(f"{name} ended with exit code {code}{f': {said}' if said else ''}", flush=True)
    reception.write()
    api.delete("Job", name, uid=job["metadata"]["uid"])
    return code


def _await_end(api: Api, name: str, request: OneOffRequest) -> tuple[Object, list[Object]]:
    """The Job once it has ended, and its pods. One that will not begin is deleted, and told."""
    wait = _Wait(api, name, request.start_timeout_seconds)
    while True:
        try:
            job, pods = api.find("Job", name), api.find_all("Pod", f"job-name={name}")
            if job is None:
                raise DeviceError(f"Job {name} is gone: somebody deleted it. The same command begins again")
            if is_over(job):
                return job, pods
            wait.look(job, pods)
        except ApiUnreachable as error:
            print(f"{name}: {error}; it goes on without us", file=sys.stderr)
        except (NoNode, TryAgain):
            api.delete("Job", name)
            raise
        time.sleep(POLL_SECONDS)


class _Wait:
    """Watches a one-off that goes on: does its pod begin, and does it leave when it is told to?"""

    def __init__(self, api: Api, name: str, start_timeout_seconds: float) -> None:
        self._api, self._name = api, name
        self._deadline = time.monotonic() + start_timeout_seconds
        self._timeout_seconds = start_timeout_seconds
        self._pull: PullWatch | None = None
        self._leaving_since: float | None = None

    def look(self, job: Object, pods: list[Object]) -> None:
        """Raises `NoNode`, or `TryAgain` after the time in which it has to begin."""
        if any("deletionTimestamp" in pod["metadata"] for pod in pods):
            self._end_lost(pods)
        elif not any((pod.get("status") or {}).get("phase") not in (None, "Pending") for pod in pods):
            self._require_start(job, pods)

    def _require_start(self, job: Object, pods: list[Object]) -> None:
        waits = newest_event(self._api, job) or "no pod was made"  # as where the quota has no room
        for pod in pods:
            waits = explain_wait(self._api, pod)
            self._pull = self._pull or PullWatch(image_of(pod["spec"]))
            if problem := self._pull.explain_end(pod, waits):
                raise NoNode(problem, DeviceError.exit_code)
        self._require_nodes()
        if time.monotonic() > self._deadline:
            raise TryAgain(
                f"{self._name} did not begin within {self._timeout_seconds:g} s (WAIT=), and is deleted: {waits}"
            )

    def _require_nodes(self) -> None:
        """Where nodes come from a group, does the Job still work that brings one?"""
        nodes_job = self._api.find("Job", one_off_nodes_name(self._name))
        outcome = ((nodes_job or {}).get("metadata", {}).get("annotations") or {}).get(OUTCOME_ANNOTATION)
        if outcome:
            told = Outcome.from_fields(json.loads(outcome))
            raise NoNode(f"no node comes for {self._name}, and it is deleted: {told.message}", told.exit_code)
        if nodes_job and is_over(nodes_job):
            raise NoNode(
                f"no node comes for {self._name}, and it is deleted: the Job that was to bring one has ended, with the "
                f"words above. A head that is older than this checkout has no such program: {UPDATE_HEAD}",
                DeviceError.exit_code,
            )

    def _end_lost(self, pods: list[Object]) -> None:
        """A pod on a lost node stays Terminating, and with it the Job."""
        self._leaving_since = self._leaving_since or time.monotonic()
        if time.monotonic() - self._leaving_since > LEAVE_SECONDS:
            for pod in pods:
                self._api.delete("Pod", pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace_seconds=0)
