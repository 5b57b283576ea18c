"""Runs a subcommand of a stage on KubeRay: in a Job of its own, on a CPU node, followed to its end.

Nothing is created before the image is known to have the subcommand. The client deletes the Job at its end. A Job whose
client was interrupted continues, and the same command of the same person follows it again.
"""

from __future__ import annotations

import getpass
import json
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from deploy.client.one_off_request import (
    OneOffRequest,
    complete_words,
    describe_judge,
    identify,
    needs_recipe,
    require_known,
)
from deploy.client.requested_recipe import RequestedRecipe, parse_requested_recipe, read_requested_recipe
from k8s.client.deployment_manifests import write_documents
from k8s.client.deployment_watch import PodOutput
from k8s.client.pull_watch import PullWatch, explain_wait
from k8s.client.resolved_deployment import START_TIMEOUT_SECONDS, default_recipe_of
from k8s.client.stage_image import choose_image, find_image_labels
from k8s.objects.api import Api, ApiUnreachable, Object
from k8s.objects.capacity import check_nodes
from k8s.objects.conditions import is_job_over
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
    read_end,
    render_one_off_job,
    render_one_off_nodes_job,
)
from k8s.objects.placement import newest_event
from k8s.objects.recipe import find_recipe_text
from k8s.objects.record import Outcome, read_record
from k8s.objects.worker_group import WorkerGroup, image_of, read_cluster, worker_group_of
from services.common.errors import DeviceError, MillraceError, TryAgain
from services.common.recipe.packed_recipe import pack_recipe

POLL_SECONDS = 1.0
LAST_FILES_SECONDS = 120.0
LEAVE_SECONDS = 120.0
"""Seconds after which a pod that does not terminate is deleted by force, since its node is lost."""


class NoNode(MillraceError):
    """No node or no image will come for the one-off, so its Job was deleted."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class _ResolvedOneOff:
    """A one-off that passed every check that needs no Job."""

    one_off: OneOff
    job: Object
    nodes_job: Object | None
    """The Job that scales a node group up; None for static nodes."""
    plan: str


def run_one_off(api: Api, request: OneOffRequest, manifests: TextIO | None = None) -> int:
    """Show the plan, create the Jobs and follow them: the subcommand's own exit code. Ctrl-C deletes the Jobs.

    Where an identical request of the same person already has a Job, that Job is followed and none is created.
    """
    resolved = _resolve(api, request)
    print(resolved.plan, flush=True)
    if request.is_dry_run:
        print("\nDRY_RUN=1: nothing was changed")
        if manifests:
            write_documents(manifests, api, _documents(resolved))
        return 0
    found = _find(api, resolved.one_off.digest)
    name = str(found["metadata"]["name"]) if found else resolved.one_off.name
    if found:
        state = "has already run" if is_job_over(found) else "already runs"
        print(f"{name} of {found['metadata']['creationTimestamp']} {state} this request; following it", flush=True)
    try:
        if not found:
            _submit(api, resolved)
        if request.is_followed:
            return _follow(api, name, request)
    except KeyboardInterrupt:
        api.delete("Job", name)
        print(f"\n{name} is deleted: its pod gets SIGTERM")
        raise
    print(f"{name} continues. The same command without FOLLOW=0 follows it, and Ctrl-C then ends it")
    return 0


def describe_one_offs(api: Api) -> list[str]:
    """The Jobs of one-offs, one a line."""
    return [
        f"  {job['metadata']['name']}  {'ended, not yet followed' if is_job_over(job) else 'runs'}, since "
        f"{job['metadata']['creationTimestamp']}: {describe_words(job)}"
        for job in api.find_all("Job", f"{COMPONENT_LABEL}={ONE_OFF}")
    ]


def _resolve(api: Api, request: OneOffRequest) -> _ResolvedOneOff:
    """Creates nothing. Raises `RecipeError` for a wrong request, `DeviceError` for one that cannot be served."""
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
        recipe=pack_recipe(recipe.text.encode()) if recipe else "",
        seconds=request.seconds,
        user=getpass.getuser(),
        memory_gib=request.memory_gib,
    )
    job = render_one_off_job(group, cpu_group, one_off)
    nodes_job = render_one_off_nodes_job(cpu_group, one_off) if cpu_group.node_pool else None
    plan = [*_describe(api, cpu_group, one_off, job, recipe), describe_judge(labels)]
    return _ResolvedOneOff(one_off, job, nodes_job, "\n".join(filter(None, plan)))


def _choose_image(api: Api, group: WorkerGroup, tag: str) -> str:
    """The image that TAG names; else that of the newest deployment; else the newest with which the stage ended well;
    else that of this checkout.
    """
    if tag:
        return choose_image(api, group.name, group.variant, group.container, tag)
    if group.has_image:
        return group.image
    if group.good_images:
        return group.good_images[-1]
    return choose_image(api, group.name, group.variant, group.container, "")


def _choose_recipe(api: Api, group: WorkerGroup, request: OneOffRequest) -> RequestedRecipe:
    """The recipe that RECIPE names; else that of the newest deployment, with its overrides; else the overlay's."""
    if request.recipe:
        return request.recipe
    record = read_record(api, group.name)
    text = find_recipe_text(api, group.name, record.deployment.recipe_digest) if record else None
    if record and text:
        recipe = parse_requested_recipe(text, f"that of the {group.name}'s newest deployment")
        return recipe.with_arguments(*record.deployment.arguments).with_overrides_only()
    return read_requested_recipe(default_recipe_of(group))


def _describe(
    api: Api, cpu_group: WorkerGroup, one_off: OneOff, job: Object, recipe: RequestedRecipe | None
) -> list[str]:
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    requested = limits.get("requests", {})
    price, hours = cpu_group.dollars_per_node_hour, one_off.seconds / 3600
    lines = []
    if price is not None:
        node = cpu_group.instance_type or "a node"
        lines.append(
            f"cost        {node} at ${price:,.2f} an hour: ${price * hours:,.2f} at most, after {hours:g} h (HOURS=)"
        )
    if cpu_group.node_pool:
        lines.append(f"nodes       node group {cpu_group.node_pool}: one node is added, and removed afterwards")
    elif lacking := check_nodes(api, cpu_group, 1):
        lines.append(f"nodes       {lacking}: the Job waits for a node")
    lines += [
        f"runs        {one_off.stage}: {shlex.join(one_off.words)}",
        f"image       {one_off.image}",
        f"recipe      {recipe.describe() if recipe else 'none: the subcommand takes none'}",
        f"takes       {requested.get('cpu')} CPUs and {limits['limits']['memory']} of memory on one node (MEMORY=)",
    ]
    return lines


def _documents(resolved: _ResolvedOneOff) -> list[tuple[str, Object]]:
    nodes = [("it holds the node while the other Job runs", resolved.nodes_job)] if resolved.nodes_job else []
    return [*nodes, ("the client creates it, and deletes it at its end", resolved.job)]


def _find(api: Api, digest: str) -> Object | None:
    """The newest Job of an identical request. A Job whose end a client has seen is deleted, so it is not found."""
    found = api.find_all("Job", f"{COMPONENT_LABEL}={ONE_OFF},{DEPLOYMENT_LABEL}={digest}")
    left = [job for job in found if "deletionTimestamp" not in job["metadata"]]
    return max(left, key=lambda job: str(job["metadata"]["creationTimestamp"]), default=None)


def _submit(api: Api, resolved: _ResolvedOneOff) -> None:
    """Create the Jobs. The one that adds a node comes first, since it waits for the other."""
    if resolved.nodes_job:
        api.create(resolved.nodes_job)
    try:
        api.create(resolved.job)
    except MillraceError:
        if resolved.nodes_job:
            api.delete("Job", resolved.nodes_job["metadata"]["name"])
        raise


def _follow(api: Api, name: str, request: OneOffRequest) -> int:
    """Print the output until the Job has ended, and delete it."""
    output = PodOutput(api, f"job-name={name}", CONTAINER, name)
    output.start()
    if api.find("Job", one_off_nodes_name(name)):
        PodOutput(api, f"job-name={one_off_nodes_name(name)}", "nodes", f"node of {name}").start()
    job, pods = _await_end(api, name, request)
    output.finish(LAST_FILES_SECONDS)
    code, said = read_end(job, pods)
    print(f"{name} ended with exit code {code}{f': {said}' if said else ''}", flush=True)
    api.delete("Job", name, uid=job["metadata"]["uid"])
    return code


def _await_end(api: Api, name: str, request: OneOffRequest) -> tuple[Object, list[Object]]:
    """Wait for the Job's end: the Job and its pods. A Job that will not start is deleted.

    Raises `NoNode` where no node or image will come, and `TryAgain` after the seconds of WAIT.
    """
    seconds = START_TIMEOUT_SECONDS if request.start_timeout_seconds is None else request.start_timeout_seconds
    wait = _StartWatch(api, name, seconds)
    while True:
        try:
            job, pods = api.find("Job", name), api.find_all("Pod", f"job-name={name}")
            if job is None:
                raise DeviceError(f"Job {name} is gone: somebody deleted it. Repeat the command to start again")
            if is_job_over(job):
                return job, pods
            wait.look(job, pods)
        except ApiUnreachable as error:
            print(f"{name}: {error}; the Job continues", file=sys.stderr)
        except (NoNode, TryAgain):
            api.delete("Job", name)
            raise
        time.sleep(POLL_SECONDS)


class _StartWatch:
    """Watches a one-off's pod: whether it starts in time, and whether it terminates when it is deleted."""

    def __init__(self, api: Api, name: str, start_timeout_seconds: float) -> None:
        self._api, self._name = api, name
        self._deadline = time.monotonic() + start_timeout_seconds
        self._timeout_seconds = start_timeout_seconds
        self._pull: PullWatch | None = None
        self._leaving_since: float | None = None

    def look(self, job: Object, pods: list[Object]) -> None:
        """Raises `NoNode` where no node or image will come, and `TryAgain` after the time limit of the start."""
        if any("deletionTimestamp" in pod["metadata"] for pod in pods):
            self._end_lost(pods)
        elif not any((pod.get("status") or {}).get("phase") not in (None, "Pending") for pod in pods):
            self._require_start(job, pods)

    def _require_start(self, job: Object, pods: list[Object]) -> None:
        waits = newest_event(self._api, job) or "it has no pod yet"  # as where the quota is used up
        for pod in pods:
            waits = explain_wait(self._api, pod)
            self._pull = self._pull or PullWatch(image_of(pod["spec"]))
            if problem := self._pull.explain_end(pod, waits):
                raise NoNode(problem, DeviceError.exit_code)
        self._require_nodes()
        if time.monotonic() > self._deadline:
            raise TryAgain(
                f"{self._name} did not start within {self._timeout_seconds:g} s (WAIT=), and was deleted: {waits}"
            )

    def _require_nodes(self) -> None:
        """Raise `NoNode` where the Job that scales the node group up has ended."""
        nodes_job = self._api.find("Job", one_off_nodes_name(self._name))
        outcome = ((nodes_job or {}).get("metadata", {}).get("annotations") or {}).get(OUTCOME_ANNOTATION)
        if outcome:
            ended = Outcome.from_fields(json.loads(outcome))
            raise NoNode(f"{self._name} gets no node, and was deleted: {ended.message}", ended.exit_code)
        if nodes_job and is_job_over(nodes_job):
            raise NoNode(
                f"{self._name} gets no node, and was deleted: the Job that adds one has ended, with the output above. "
                f"A head that is older than this checkout does not have that Job's program: {UPDATE_HEAD}",
                DeviceError.exit_code,
            )

    def _end_lost(self, pods: list[Object]) -> None:
        """Delete pods by force that stay Terminating, as they do on a lost node, and the Job with them."""
        self._leaving_since = self._leaving_since or time.monotonic()
        if time.monotonic() - self._leaving_since > LEAVE_SECONDS:
            for pod in pods:
                self._api.delete("Pod", pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace_seconds=0)
