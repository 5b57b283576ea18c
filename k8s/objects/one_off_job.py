"""The two Jobs of a one-off: one runs a subcommand of a stage on a CPU node, the other holds that node.

The first has the stage's image and service account, and no rights in the cluster. The second exists only where CPU
nodes come from a managed node group; it has the deployer's service account and runs one program of the head's image.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from decimal import Decimal

from deploy.exit_codes import EXIT_AGAIN
from deploy.stage_contract import ONE_OFF_DRAIN_SECONDS, ROOT, SCRATCH, find_contract, make_one_off_command
from k8s.objects.api import Object, conditions_of, is_job_over
from k8s.objects.deploy_job import render_head_program, render_short_job
from k8s.objects.names import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    ONE_OFF,
    ONE_OFF_NODES,
    STAGE_LABEL,
    USER_ANNOTATION,
    one_off_nodes_name,
)
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, WorkerGroup, quantity, worker_group_of
from services.common.errors import LimitError
from services.common.recipe.packed_recipe import RECIPE_VARIABLE
from services.common.recipe.schema import Stage

CONTAINER = "one-off"
CPU_STAGE: Stage = "tokenizer"
"""The stage whose pods use no device on any cluster. A one-off runs on the same nodes, with the same resources."""
NODES_MARGIN_SECONDS = 3_600
NODES_TRIES = 3
NODES_GRACE_SECONDS = 300
GIB = 2**30


@dataclass(frozen=True)
class OneOff:
    """One subcommand of a stage that a Job runs on the cluster."""

    stage: Stage
    id: str
    """A random name."""
    digest: str
    """The digest of the request and its user, by which the same command finds its Job again."""
    image: str
    words: tuple[str, ...]
    """The subcommand and its arguments."""
    recipe: str
    """The packed recipe; empty for a subcommand without one."""
    seconds: int
    """The deadline of the Job in seconds, which includes the wait for its node."""
    user: str
    memory_gib: int | None = None
    """Requested memory in GiB; None requests as much as a pod of a CPU node has."""

    @property
    def name(self) -> str:
        return f"{ONE_OFF}-{self.stage}-{self.id}"

    def labels(self, component: str) -> dict[str, str]:
        return {STAGE_LABEL: self.stage, DEPLOYMENT_LABEL: self.digest, COMPONENT_LABEL: component}


def cpu_group_of(cluster: Object) -> WorkerGroup:
    """The worker group whose nodes and resources a one-off gets."""
    return worker_group_of(cluster, CPU_STAGE)


def render_one_off_job(group: WorkerGroup, cpu_group: WorkerGroup, one_off: OneOff) -> Object:
    """The Job of a one-off, with the service account of the stage's `group` and the nodes of `cpu_group`.

    Raises `LimitError` for more memory than a pod of `cpu_group` has.
    """
    place, container = cpu_group.pod, group.container
    command = make_one_off_command(one_off.stage, group.root, one_off.words)
    at = command.index("--root")  # the admission policy checks the program before it
    pod: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": group.pod["serviceAccountName"],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": ONE_OFF_DRAIN_SECONDS + DRAIN_MARGIN_SECONDS,
        "securityContext": group.pod["securityContext"],
        **{name: place[name] for name in ("nodeSelector", "tolerations", "imagePullSecrets") if name in place},
        "volumes": _of_storage(place["volumes"]),
        "containers": [
            {
                "name": CONTAINER,
                "image": one_off.image,
                "imagePullPolicy": container["imagePullPolicy"],
                "command": command[:at],
                "args": command[at:],
                "env": _render_variables(one_off),
                "resources": _scale_resources(cpu_group, one_off.memory_gib),
                "securityContext": container["securityContext"],
                "volumeMounts": _of_storage(cpu_group.container["volumeMounts"]),
            }
        ],
    }
    labels = one_off.labels(ONE_OFF)
    # No further tries: a failed one-off is repeated by a person alone.
    job = render_short_job(one_off.name, labels, pod, limit_seconds=one_off.seconds)
    job["metadata"]["annotations"] = {USER_ANNOTATION: one_off.user}
    return job


def render_one_off_nodes_job(cpu_group: WorkerGroup, one_off: OneOff) -> Object:
    """The Job that holds a node of the CPU node group while the one-off runs, and gives it back afterwards."""
    pod = render_head_program(
        cpu_group,
        name="nodes",
        program="k8s.controller.one_off_nodes",
        argument=one_off.name,
        variables=[],
        volumes=(SCRATCH.name,),
        grace_seconds=NODES_GRACE_SECONDS,
    )
    return render_short_job(
        one_off_nodes_name(one_off.name),
        one_off.labels(ONE_OFF_NODES),
        pod,
        limit_seconds=one_off.seconds + NODES_MARGIN_SECONDS,
        tries=NODES_TRIES,  # the reaper gives back a node that a failed Job leaves
    )


def is_active(job: Object | None) -> bool:
    """Whether a one-off's Job needs its node."""
    return job is not None and not is_job_over(job) and "deletionTimestamp" not in job["metadata"]


def describe_words(job: Object) -> str:
    """The subcommand that a one-off's Job runs, as a person typed it."""
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return shlex.join(words[words.index("--") + 1 :])


def read_end(job: Object, pods: list[Object]) -> tuple[int, str]:
    """The exit code of an ended one-off, and a sentence about its end that its own output lacks, or empty text."""
    if any(each.get("reason") == "DeadlineExceeded" and each["status"] == "True" for each in conditions_of(job)):
        hours = int(job["spec"]["activeDeadlineSeconds"]) / 3600
        return EXIT_AGAIN, f"it did not end within {hours:g} h, which include the wait for its node (HOURS=)"
    statuses = [each for pod in pods for each in (pod.get("status") or {}).get("containerStatuses") or []]
    end = next(filter(None, (each.get("state", {}).get("terminated") for each in statuses)), None)
    if end is None:
        return EXIT_AGAIN, "its pod was lost with its node, or was evicted; the same command starts it again"
    if end.get("reason") == "OOMKilled":
        limit = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
        return LimitError.exit_code, f"it was killed at its memory limit, {limit} (MEMORY=)"
    code = int(end["exitCode"])
    if code > 128:  # a signal that the program did not handle, such as at the end of its node
        return EXIT_AGAIN, f"it was killed ({end.get('reason', 'no reason given')}, exit code {code})"
    return code, ""


def _render_variables(one_off: OneOff) -> list[Object]:
    contract = find_contract(one_off.stage, None).with_drain(ONE_OFF_DRAIN_SECONDS)
    recipe = {RECIPE_VARIABLE: one_off.recipe} if one_off.recipe else {}
    secrets: list[Object] = [
        {"name": each.name, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key, "optional": True}}}
        for each in contract.secrets
    ]
    return [{"name": name, "value": value} for name, value in (contract.variables | recipe).items()] + secrets


def _scale_resources(group: WorkerGroup, memory_gib: int | None) -> Object:
    """The resources of a pod of the group, all scaled by the same factor if `memory_gib` is given.

    CPUs are rounded down to thousandths, and everything else to whole bytes.
    """
    resources: Object = group.container.get("resources", {})
    if memory_gib is None:
        return resources
    most = group.requests["memory"] / GIB
    if not 1 <= memory_gib <= most:
        raise LimitError(
            f"MEMORY={memory_gib}: a one-off takes from 1 to {most:g} GiB, the memory of a pod on a CPU node. For "
            f"larger nodes, set CPU_SHAPE in the overlay's settings.env, then: make cluster-up"
        )
    share = Decimal(memory_gib) / most

    def scale(name: str, text: str) -> str:
        amount = quantity(text) * share
        return f"{int(amount * 1000)}m" if name == "cpu" else str(int(amount))

    return {kind: {name: scale(name, text) for name, text in each.items()} for kind, each in resources.items()}


def _of_storage(named: list[Object]) -> list[Object]:
    """The volumes or mounts that a one-off gets: scratch space and the shared file system."""
    return [each for each in named if each["name"] in (SCRATCH.name, ROOT.name)]
