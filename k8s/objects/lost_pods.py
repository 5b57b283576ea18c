"""Pods whose node is lost. No kubelet confirms their end, so they stay Terminating for ever, and KubeRay counts them as
present: it makes no other in their place, and a stage that is scaled down never has none. A node whose accelerators,
kernel or network have failed is lost, too, although it answers: an agent says so in its conditions.

Removing such a pod by force is safe here although its processes may live on behind a broken network: whoever writes an
artifact holds a lease with a token that is checked at commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from k8s.objects.api import Api, Object
from k8s.objects.names import COMPONENT_LABEL
from k8s.objects.placement import is_ready

UNREACHABLE = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"  # a person says that the machine is off
GRACE_SECONDS = 30.0  # Kubernetes' default
FAULTS = {
    # EKS' node monitoring agent; its node repair replaces such a node after 10 to 30 minutes.
    "AcceleratedHardwareReady": "False",
    "KernelReady": "False",
    "NetworkingReady": "False",
    "StorageReady": "False",
    "ContainerRuntimeReady": "False",
    # Neuron's node problem detector (infra/addons/values/neuron.yaml).
    "NeuronHealth": "True",
}
"""Conditions of a node that agents on it write, with the status of each that tells a fault."""


@dataclass(frozen=True)
class Loss:
    """What is wrong with a node."""

    text: str
    is_certain: bool
    """The machine is off or gone. Else it may come back, and its pods may still end by themselves."""
    is_fault: bool = False
    """The node answers, and part of it has failed: its pods may look well, and none should begin there."""


class LostPods:
    """Removes a stage's pods from lost nodes, each after its grace period by this process's own clock."""

    def __init__(self, api: Api, stage: str, report: Callable[[str], None]) -> None:
        self._api, self._stage, self._report = api, stage, report
        self._lost_since: dict[str, float] = {}  # by the pod's uid
        self.faults = ""
        """The nodes with a fault on which the last look found pods of the stage; no attempt should begin there."""

    def remove(self, is_idle: bool) -> int:
        """Remove what is due: pods that were asked to leave and, while no driver needs them, the stage's others.

        The number of pods that were found on lost nodes and do not look well.
        """
        idle_stage = self._stage if is_idle else ""
        suspects = [pod for pod in self._pods() if _is_leaving_or_idle(pod, idle_stage)]
        nodes = {pod["spec"]["nodeName"] for pod in suspects}
        there = {node["metadata"]["name"]: node for node in (self._api.find_all("Node") if nodes else [])}
        losses = {name: loss for name in nodes if (loss := loss_of(there.get(name)))}
        before, now = self._lost_since, time.monotonic()
        lost = [
            pod
            for pod in suspects
            if (loss := losses.get(pod["spec"]["nodeName"])) and (loss.is_fault or not is_ready(pod))
        ]
        faulty = {name: loss.text for name, loss in losses.items() if loss.is_fault}
        self.faults = "; ".join(f"node {name}, where pods of the stage are, {text}" for name, text in faulty.items())
        self._lost_since = {uid: before.get(uid, now) for uid in map(_uid, lost)}
        for pod in lost:
            name, uid, grace = pod["metadata"]["name"], _uid(pod), grace_seconds(pod)
            loss = losses[pod["spec"]["nodeName"]]
            where = f"pod {name} is on node {pod['spec']['nodeName']}, which {loss.text}"
            if is_due(loss, grace, now - self._lost_since[uid]):
                self._api.delete("Pod", name, uid=uid, grace_seconds=0)
                self._report(f"{where}: removed by force")
            elif uid not in before:
                self._report(f"{where}: it has {grace:.0f} s to end, then it is removed by force")
        return sum(not is_ready(pod) for pod in lost)

    def _pods(self) -> list[Object]:
        """Every pod that a deployment of the stage waits for: its own, deploy Jobs', and Ray's heads."""
        return self._api.find_all("Pod", f"{COMPONENT_LABEL} in ({self._stage},deploy,head,isolated-head)")


def loss_of(node: Object | None) -> Loss | None:
    """What is wrong with a node that ends no pods any more; None for one that does."""
    if node is None:
        return Loss("is gone", is_certain=True)
    taints = {taint["key"] for taint in node["spec"].get("taints") or []}
    if OUT_OF_SERVICE in taints:
        return Loss("is out of service", is_certain=True)
    if UNREACHABLE in taints:
        return Loss("is unreachable", is_certain=False)
    conditions = {each["type"]: each for each in node.get("status", {}).get("conditions") or []}
    if conditions.get("Ready", {}).get("status") != "True":
        return Loss("is not ready", is_certain=False)
    for name, status in FAULTS.items():
        if (found := conditions.get(name, {})).get("status") == status:
            reason = f" ({found['reason']})" if found.get("reason") else ""
            return Loss(f"has a fault: {name} is {status}{reason}", is_certain=False, is_fault=True)
    return None


def grace_seconds(pod: Object) -> float:
    """How long the pod may take to end. A deploy Job's has no work of its own that could be lost: the Lease passes on.

    And the Job is not over before its last pod is gone.
    """
    if pod["metadata"]["labels"].get(COMPONENT_LABEL) == "deploy":
        return GRACE_SECONDS
    asked = pod["metadata"].get("deletionGracePeriodSeconds")
    own = pod["spec"].get("terminationGracePeriodSeconds")
    return float(next(each for each in (asked, own, GRACE_SECONDS) if each is not None))


def is_due(loss: Loss, grace: float, lost_for_seconds: float) -> bool:
    return loss.is_certain or lost_for_seconds > grace


def _is_leaving_or_idle(pod: Object, idle_stage: str) -> bool:
    """Was the pod asked to leave, or does its stage have no driver that would miss it?"""
    if not pod["spec"].get("nodeName"):
        return False
    metadata = pod["metadata"]
    return "deletionTimestamp" in metadata or metadata["labels"][COMPONENT_LABEL] == idle_stage


def _uid(pod: Object) -> str:
    return str(pod["metadata"]["uid"])
