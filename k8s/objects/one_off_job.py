"""The Jobs of a one-off: one runs a subcommand of a stage on a CPU node, and one holds that node.

The first has the stage's image and account, and no rights in the cluster. The second is there where CPU nodes come from
a managed node group; it has the deployer's account and runs one program of the head's image.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from decimal import Decimal

from deploy.exit_codes import EXIT_AGAIN
from deploy.stage_contract import ONE_OFF_DRAIN_SECONDS, ROOT, SCRATCH, find_contract, make_one_off_command
from k8s.objects.api import Object
from k8s.objects.deploy_job import render_head_program
from k8s.objects.names import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    NEURON,
    ONE_OFF,
    ONE_OFF_NODES,
    STAGE_LABEL,
    USER_ANNOTATION,
    one_off_nodes_name,
)
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, WorkerGroup, quantity, worker_group_of
from services.common.errors import DeviceError, LimitError
from services.common.launch.batch.node import RECIPE_VARIABLE
from services.common.recipe.schema import Stage

CONTAINER = "one-off"
CPU_STAGE: Stage = "tokenizer"
"""The stage whose pods have no use for a device on any cluster: a one-off goes where they do, and is as large."""
KEPT_SECONDS = 3_600
"""Seconds for which a one-off that has ended stays, for whoever did not see its end."""
NODES_MARGIN_SECONDS = 3_600
NODES_TRIES = 3
NODES_GRACE_SECONDS = 300
GIB = 2**30


@dataclass(frozen=True)
class OneOff:
    """What a one-off's Job is to run."""

    stage: Stage
    id: str
    """Random."""
    digest: str
    """The same for the same request of the same person."""
    image: str
    words: tuple[str, ...]
    """The subcommand and its arguments."""
    bring: tuple[str, ...]
    recipe: str
    """Packed; empty where the subcommand takes none."""
    seconds: int
    """After which it is ended, the wait for its node included."""
    user: str
    memory_gib: int | None = None
    """None: all that a pod of a CPU node has."""

    @property
    def name(self) -> str:
        return f"{ONE_OFF}-{self.stage}-{self.id}"


def cpu_group_of(cluster: Object) -> WorkerGroup:
    """The worker group by whose pods a one-off is placed. Raises `DeviceError` where they have devices."""
    group = worker_group_of(cluster, CPU_STAGE)
    if NEURON in group.requests:
        raise DeviceError(
            f"worker group {CPU_STAGE} asks for {NEURON}, and a one-off goes to the nodes of its pods, without a "
            f"device: give that group CPU nodes in the overlay, then: make cluster-up"
        )
    return group


def render_one_off_job(group: WorkerGroup, cpu_group: WorkerGroup, one_off: OneOff) -> Object:
    """The Job with the account and image of the stage's `group`, where pods of `cpu_group` may be.

    Raises `LimitError` for more memory than such a pod has.
    """
    labels = {STAGE_LABEL: one_off.stage, DEPLOYMENT_LABEL: one_off.digest, COMPONENT_LABEL: ONE_OFF}
    place, container = cpu_group.pod, group.container
    command = make_one_off_command(one_off.stage, group.root, one_off.words, one_off.bring)
    at = command.index("--root")  # the program, which the admission policy holds, and its options
    pod: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": group.pod["serviceAccountName"],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": ONE_OFF_DRAIN_SECONDS + DRAIN_MARGIN_SECONDS,
        "securityContext": group.pod["securityContext"],
        **{name: place[name] for name in ("nodeSelector", "tolerations", "imagePullSecrets") if name in place},
        "volumes": _of_a_one_off(place["volumes"]),
        "containers": [
            {
                "name": CONTAINER,
                "image": one_off.image,
                "imagePullPolicy": container["imagePullPolicy"],
                "command": command[:at],
                "args": command[at:],
                "env": _render_variables(one_off),
                "resources": _scaled(cpu_group, one_off.memory_gib),
                "securityContext": container["securityContext"],
                "volumeMounts": _of_a_one_off(cpu_group.container["volumeMounts"]),
            }
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": one_off.name, "labels": labels, "annotations": {USER_ANNOTATION: one_off.user}},
        "spec": {
            "backoffLimit": 0,  # a person types it again
            "activeDeadlineSeconds": one_off.seconds,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def render_one_off_nodes_job(cpu_group: WorkerGroup, one_off: OneOff) -> Object:
    """The Job that has a node of the CPU nodes' group for as long as the one-off goes on, and gives it back then."""
    labels = {STAGE_LABEL: one_off.stage, DEPLOYMENT_LABEL: one_off.digest, COMPONENT_LABEL: ONE_OFF_NODES}
    pod = render_head_program(
        cpu_group,
        name="nodes",
        program="k8s.controller.one_off_nodes",
        argument=one_off.name,
        variables=[],
        volumes=(SCRATCH.name,),
        grace_seconds=NODES_GRACE_SECONDS,
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": one_off_nodes_name(one_off.name), "labels": labels},
        "spec": {
            "backoffLimit": NODES_TRIES,  # the reaper gives back what it leaves
            "activeDeadlineSeconds": one_off.seconds + NODES_MARGIN_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def is_over(job: Object) -> bool:
    """Has the Job ended, in whatever way?"""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)


def is_active(job: Object | None) -> bool:
    """Does a one-off's Job go on, so that it needs its node? A suspended one does not: its time would never run out."""
    if job is None or is_over(job) or "deletionTimestamp" in job["metadata"]:
        return False
    return not job["spec"].get("suspend") and (job["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == ONE_OFF


def describe_words(job: Object) -> str:
    """The subcommand that a one-off's Job runs, as a person types it."""
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return shlex.join(words[words.index("--") + 1 :])


def read_end(job: Object, pods: list[Object]) -> tuple[int, str]:
    """The exit code of a one-off that is over, and what a person has to know besides its own output, or nothing."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("reason") == "DeadlineExceeded" and condition["status"] == "True":
            seconds = int(job["spec"]["activeDeadlineSeconds"])
            return EXIT_AGAIN, f"it did not end within {seconds / 3600:g} h, the wait for its node included (HOURS=)"
    ends = [_terminated(pod) for pod in pods]
    end = next(filter(None, ends), None)
    if end is None:
        return EXIT_AGAIN, "its pod was lost with its node, or was evicted. The same command begins again"
    if end.get("reason") == "OOMKilled":
        return LimitError.exit_code, f"it was killed at the limit of its memory, {_limit_of(job)} (MEMORY=)"
    code = int(end["exitCode"])
    if code > 128:  # ended by a signal that the program did not handle, as when its node goes
        return EXIT_AGAIN, f"it was killed ({end.get('reason', 'no reason is given')}, exit code {code})"
    return code, ""


def _render_variables(one_off: OneOff) -> list[Object]:
    contract = find_contract(one_off.stage, None).with_drain(ONE_OFF_DRAIN_SECONDS)
    variables: list[Object] = [{"name": name, "value": value} for name, value in contract.variables.items()]
    variables += [{"name": RECIPE_VARIABLE, "value": one_off.recipe}] if one_off.recipe else []
    for each in contract.secrets:
        reference = {"name": each.secret, "key": each.key, "optional": True}
        variables.append({"name": each.name, "valueFrom": {"secretKeyRef": reference}})
    return variables


def _scaled(group: WorkerGroup, memory_gib: int | None) -> Object:
    """The resources of a pod of the group, or the share of each that comes with so much memory."""
    resources: Object = group.container.get("resources", {})
    if memory_gib is None:
        return resources
    most = group.requests["memory"] / GIB
    if not 1 <= memory_gib <= most:
        raise LimitError(
            f"MEMORY={memory_gib}: a one-off takes from 1 to {most:g} GiB, as much as a pod of a CPU node has. Larger "
            f"nodes are CPU_SHAPE in the overlay's settings.env, then: make cluster-up"
        )
    share = Decimal(memory_gib) / most
    return {
        kind: {name: _share_of(name, text, share) for name, text in each.items()} for kind, each in resources.items()
    }


def _share_of(resource: str, text: str, share: Decimal) -> str:
    """In thousandths of CPUs and in whole bytes, neither of which has a fraction."""
    amount = quantity(text) * share
    return f"{int(amount * 1000)}m" if resource == "cpu" else str(int(amount))


def _of_a_one_off(named: list[Object]) -> list[Object]:
    """Of volumes or mounts, those that a one-off has: a folder of its own and the shared file system."""
    return [each for each in named if each["name"] in (SCRATCH.name, ROOT.name)]


def _terminated(pod: Object) -> Object | None:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ends = [each["state"]["terminated"] for each in statuses if each.get("state", {}).get("terminated")]
    return dict(ends[0]) if ends else None


def _limit_of(job: Object) -> str:
    return str(job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"])
