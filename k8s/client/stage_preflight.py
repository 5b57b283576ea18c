"""Checks whether a stage could run, before the client creates anything: the preflight of a deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from deploy.client.instance_type import check_instance_type
from deploy.client.outline import Outline
from k8s.client.compile_tasks import check_trace
from k8s.client.node_pool_checks import check_pool, check_reservation
from k8s.client.probe import Answer, probe_head, probe_stage
from k8s.objects.api import Api, ApiUnreachable
from k8s.objects.capacity import check_nodes, check_queue, check_size
from k8s.objects.deployment import RECORD_VERSION, UPDATE_CLIENT, UPDATE_HEAD, Deployment
from k8s.objects.names import CLUSTER, DEPLOYER, NEURON
from k8s.objects.placement import explain_batch_scheduler, heads_of, is_ready
from k8s.objects.record import read_running_record
from k8s.objects.worker_group import WorkerGroup, image_of
from services.common.errors import DeviceError, RecipeError

CHANGE_SHAPE = "TRAINIUM_SHAPE in the overlay's settings.env, then: make cluster-up"


@dataclass(frozen=True)
class Problem:
    """A reason not to deploy, with the exit code of the command."""

    text: str
    exit_code: int = DeviceError.exit_code


@dataclass(frozen=True)
class Findings:
    """The results of the probes."""

    problems: list[Problem]
    upstream: list[dict[str, Any]]
    ray_version: str
    """The Ray version of the stage's image; empty where it is unknown."""


def check_cluster(api: Api, group: WorkerGroup, deployment: Deployment, outline: Outline) -> list[Problem]:
    """Problems that the Kubernetes API shows. A check that this user has no right to is a problem as well."""
    checks: list[Callable[[], Iterable[str]]] = [
        lambda: [_check_head(api, group)],
        lambda: [explain_batch_scheduler(api, group.head_pod)],
        lambda: [check_trace(group, outline)],
        lambda: [check_instance_type(group.name, outline, group.instance_type, CHANGE_SHAPE)],
        lambda: [check_size(group, deployment.nodes)],
        lambda: [check_queue(api, group, deployment.nodes)],
        lambda: _check_claims(api, group),
        lambda: _check_objects(api, group),
        # The nodes of a pool are added for the deployment; a probe of the head's image checks the pool.
        lambda: [check_reservation(group) if group.node_pool else check_nodes(api, group, deployment.nodes)],
        lambda: [_check_other_stages(api, group)],
    ]
    return [Problem(text) for check in checks for text in _found(check) if text]


def check_in_pods(api: Api, group: WorkerGroup, deployment: Deployment, recipe: str) -> Findings:
    """Problems that only pods can see, and the upstream artifacts that the stage will read.

    The stage's own image checks the recipe and the artifacts, since this checkout may know other keys.
    """
    with (
        probe_stage(
            api, group, deployment.image, recipe, list(deployment.arguments), deployment.start_timeout_seconds
        ) as stages,
        probe_head(api, group) as heads,
    ):
        head = heads.await_answer()
        problems = _check_head_image(group, head)
        if group.node_pool and not head.problem:
            problems += _check_pool(group, deployment, head)
        if problems:
            return Findings(problems, [], "")
        own = stages.await_answer()
    if own.problem:
        problems.append(Problem(_name_judge(deployment.image, own), own.exit_code))
    problems += _compare_platforms(deployment, own.platform, head.platform)
    return Findings(problems, own.upstream, own.platform.get("ray", ""))


def _check_pool(group: WorkerGroup, deployment: Deployment, head: Answer) -> list[Problem]:
    """Problems of the node pool. An EKS that does not answer has another exit code than a pool that does not fit."""
    exit_code = int(head.node_pool.get("exit_code", DeviceError.exit_code))
    said = _found(lambda: check_pool(group, deployment.nodes, head.node_pool))
    return [Problem(text, exit_code) for text in said]


def _check_head_image(group: WorkerGroup, head: Answer) -> list[Problem]:
    """Problems of the head's image, whose deploy Jobs must be able to read this client's deployments."""
    image = image_of(group.head_pod)
    if head.problem:
        return [Problem(head.problem, head.exit_code)]
    if RECORD_VERSION in head.records:
        return []
    is_head_older = max(head.records, default=0) < RECORD_VERSION
    older, update = ("the head's image", UPDATE_HEAD) if is_head_older else ("this checkout", UPDATE_CLIENT)
    reads = " and ".join(map(str, head.records)) or "none"
    return [
        Problem(
            f"the head's image {image} reads deployments of version {reads}, but this checkout writes version "
            f"{RECORD_VERSION}; {older} is older: {update}"
        )
    ]


def _name_judge(image: str, own: Answer) -> str:
    """The problem that the stage's image reported; for a recipe, with the image's name."""
    if own.exit_code != RecipeError.exit_code:
        return str(own.problem)
    return f"the image {image} does not accept this recipe: {own.problem} Correct it with RECIPE= or ARGS=."


def _found(check: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return list(check())
    except ApiUnreachable:
        raise
    except DeviceError as error:
        return [str(error)]


def _check_head(api: Api, group: WorkerGroup) -> str:
    heads = heads_of(api)
    wanted = image_of(group.head_pod)
    for pod in filter(is_ready, heads):
        runs = image_of(pod["spec"])
        if runs == wanted:
            return ""
        return (
            f"the Ray head still runs {runs}, but the cluster specifies {wanted}: when no stage runs, "
            f"kubectl -n {api.namespace} delete pod {pod['metadata']['name']}"
        )
    state = heads[0]["status"].get("phase", "unknown") if heads else "absent"
    return f"the Ray head is not ready ({state}): kubectl -n {api.namespace} describe pods -l ray.io/node-type=head"


def _check_claims(api: Api, group: WorkerGroup) -> list[str]:
    problems = []
    for claim in group.claims.values():
        found = api.find("PersistentVolumeClaim", claim)
        if found is None:
            others = [each["metadata"]["name"] for each in api.find_all("PersistentVolumeClaim")]
            problems.append(
                f"claim {claim}, which worker group {group.name} mounts, does not exist (found: "
                f"{', '.join(others) or 'none'}): make cluster-up, or correct the name in k8s/stages/{group.name}"
            )
        elif found["status"].get("phase") != "Bound":
            volume = found["spec"].get("volumeName", "any")
            problems.append(
                f"claim {claim} is {found['status'].get('phase')}, not Bound: its volume {volume} does not exist, is "
                f"bound to another claim, or is smaller than the claim"
            )
    return problems


def _check_objects(api: Api, group: WorkerGroup) -> list[str]:
    """Objects of the manifests that are missing. The operator makes the Secret, the Ray token, with the RayCluster."""
    needed = [
        ("Secret", CLUSTER),
        ("ServiceAccount", group.pod["serviceAccountName"]),
        ("ServiceAccount", DEPLOYER),
        ("PriorityClass", group.pod["priorityClassName"]),
    ]
    return [f"{kind} {name} does not exist: make cluster-up" for kind, name in needed if not api.find(kind, name)]


def _check_other_stages(api: Api, worker_group: WorkerGroup) -> str:
    """The reason why the stage must wait for another one that holds Trainium nodes; empty where none does."""
    if NEURON not in worker_group.requests:
        return ""
    for group in worker_group.cluster["spec"]["workerGroupSpecs"]:
        name = group["groupName"]
        requests = group["template"]["spec"]["containers"][0].get("resources", {}).get("requests", {})
        if name == worker_group.name or NEURON not in requests:
            continue
        record = read_running_record(api, name)
        if record:
            return (
                f"stage {name} is deployed by {record.deployment.user} and holds {record.deployment.nodes} Trainium "
                f"nodes: wait for it (make stage-status), or make stop-stage STAGE={name}"
            )
        if group.get("replicas"):
            return (
                f"{group['replicas']} pods of stage {name} are kept (KEEP=1) and hold Trainium nodes: "
                f"make stop-stage STAGE={name}"
            )
    return ""


def _compare_platforms(deployment: Deployment, ours: dict[str, str], heads: dict[str, str]) -> list[Problem]:
    """Differences to the head's platform on a shared cluster: Ray refuses nodes with another Ray or Python."""
    if deployment.mode != "shared" or not ours or not heads:
        return []
    return [
        Problem(
            f"image {deployment.image} has {what} {ours.get(what)}, but the Ray head has {heads.get(what)}, and Ray "
            f"requires the same. Build both images from one checkout (make images), or use a cluster of its own: "
            f"MODE=isolated"
        )
        for what in ("variant", "python", "ray")
        if ours.get(what) != heads.get(what)
    ]
