"""Describes a deployment on KubeRay before it is made: cost, nodes, image, restarts and timeouts."""

from __future__ import annotations

from deploy.client.outline import Outline
from deploy.stage_contract import RECIPE
from k8s.client.compile_tasks import tasks_of_a_pod
from k8s.client.node_pool_checks import describe_cost, describe_reservation, describe_source, hours_limit
from k8s.objects.api import Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import NEURON
from k8s.objects.worker_group import WorkerGroup, render_worker_group


def describe_plan(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    """The plan for a person, one fact a line, the cost first."""
    recipe = _recipe_of(render_worker_group(group, deployment))
    stage = f"stage       {group.name}: {outline.describe_topology(group.name, deployment.nodes, 'pods')}"
    told = {
        "cost": describe_cost(group, deployment, outline),
        "nodes": describe_source(group, deployment),
        "capacity": describe_reservation(group, outline),
    }
    lines = [
        *(f"{what:<12s}{text}" for what, text in told.items() if text),
        stage,
        f"image       {_change(group.image, deployment.image)}",
        f"recipe      {outline.name}, ConfigMap {_change(group.recipe, recipe)}",
        f"arguments   {' '.join(deployment.arguments) or 'none'}",
        f"restarts    {_restarts(group, deployment)}",
        f"holds       {_holds(group, deployment, outline)}",
        f"retries     {_retries(group, deployment)}",
        f"waits       {deployment.start_timeout_seconds} s for its pods at first (WAIT), and "
        f"{deployment.loss_timeout_seconds} s after a loss, while the other nodes are held (WAIT_AFTER_LOSS)",
    ]
    if group.name == "compiler" and outline.has_compile_tasks:
        at = lines.index(stage) + 1
        lines[at:at] = [f"tasks       {_tasks(group, outline)}", f"traces      {_place_of_trace(group, outline)}"]
    if deployment.fewer_nodes:
        fewer = ", ".join(map(str, deployment.fewer_nodes))
        lines.append(f"fewer       after a loss without a spare node it continues on {fewer} nodes (cluster.min_nodes)")
    measured = f"; its slowest checkpoint took {group.checkpoint_seconds} s" if group.checkpoint_seconds else ""
    lines.append(f"notice      {deployment.drain_seconds} s before a pod ends{measured}")
    if deployment.keep:
        lines.append("afterwards  KEEP=1: the pods stay up and hold their nodes until make stop-stage")
    return "\n".join(lines)


def _tasks(group: WorkerGroup, outline: Outline) -> str:
    settings = outline.compile
    return (
        f"{settings.num_workers} graphs at a time, each with {settings.task_cpus} CPUs and "
        f"{settings.task_memory_gib:g} GiB, {tasks_of_a_pod(group, outline)} on a pod"
    )


def _place_of_trace(group: WorkerGroup, outline: Outline) -> str:
    if outline.compile.trace_on == "device":
        return (
            "on a device of its pods, whose nodes are held and paid for until the last graph is compiled. If a CPU "
            "traces the same graphs (docs/operations/first-trainium-run.md, point 1), COMPILER_POOL=cpu saves them"
        )
    return "without a device" + (", although its pods have devices (COMPILER_POOL)" if NEURON in group.requests else "")


def _retries(group: WorkerGroup, deployment: Deployment) -> str:
    if group.name == "trainer":
        return f"{deployment.retries} without a new checkpoint between them, after exit code 75 or a lost head"
    return f"{deployment.retries}, after exit code 75 or a lost head"


def _restarts(group: WorkerGroup, deployment: Deployment) -> str:
    if deployment.mode == "isolated":
        return "nothing: a Ray cluster of its own starts, and ends with the stage"
    others = [name for name in _groups(group.cluster) if name != group.name]
    kept = f"the head and {' and '.join(others)} keep their pods"
    if group.replicas and render_worker_group(group, deployment)["template"] != group.spec["template"]:
        return f"{group.replicas} {group.name} pods that an earlier deployment left up; {kept}"
    return f"nothing: {group.replicas} -> {deployment.nodes} {group.name} pods; {kept}"


def _holds(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    kind = group.instance_type or "any node"
    limit = hours_limit(group, outline)
    most = f", at most {deployment.nodes * limit:.1f} an attempt" if limit else ""
    return f"{deployment.nodes} x {kind} from now until the stage ends: {deployment.nodes} node-hours an hour{most}"


def _groups(cluster: Object) -> list[str]:
    return [str(group["groupName"]) for group in cluster["spec"]["workerGroupSpecs"]]


def _recipe_of(group: Object) -> str:
    volumes = group["template"]["spec"]["volumes"]
    return str(next(volume["configMap"]["name"] for volume in volumes if volume["name"] == RECIPE.name))


def _change(before: str, after: str) -> str:
    return f"{after} (unchanged)" if before == after else f"{before} -> {after}"
