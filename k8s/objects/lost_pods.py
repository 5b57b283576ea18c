"""Deletes the pods of lost nodes by force.

No kubelet confirms the end of such a pod, so it stays Terminating for ever. KubeRay counts it as present: it creates no
pod in its place, and a stage that is scaled down never reaches 0 pods. A node whose accelerators, kernel or network
have failed counts as lost, too, although it answers: an agent on the node reports the fault in its conditions.
Kubernetes' own garbage collector deletes pods whose node object is gone, or has the taint out-of-service, in a minute.

Deleting such a pod by force is safe here even if its processes live on behind a broken network: a command that writes
an artifact or a run holds its lock until it ends, and the next attempt waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from k8s.objects.api import Api, Object, conditions_of
from k8s.objects.names import COMPONENT_LABEL, ONE_OFF
from k8s.objects.placement import is_ready

UNREACHABLE = "node.kubernetes.io/unreachable"
GRACE_SECONDS = 30.0  # Kubernetes' default
FAULTS = {
    # The EKS node monitoring agent writes these; EKS node repair replaces such a node after 10 to 30 minutes.
    "AcceleratedHardwareReady": "False",
    "KernelReady": "False",
    "NetworkingReady": "False",
    "StorageReady": "False",
    "ContainerRuntimeReady": "False",
    # Neuron's node problem detector writes this (infra/addons/values/neuron.yaml).
    "NeuronHealth": "True",
}
"""Conditions that agents on a node write, each with the status that means a fault."""


@dataclass(frozen=True)
class Loss:
    """Why a node counts as lost."""

    text: str
    is_fault: bool = False
    """Whether the node answers and a part of it has failed: its pods may look healthy, yet none should start there."""


GONE = Loss("is gone")


class LostPods:
    """Deletes a stage's pods on lost nodes, each after its grace period, measured by the clock of this process."""

    def __init__(self, api: Api, stage: str, report: Callable[[str], None]) -> None:
        self._api, self._stage, self._report = api, stage, report
        self._lost_since: dict[str, float] = {}  # by the pod's uid
        self.faults = ""
        """The nodes with a fault on which `remove` last found pods of the stage, where no attempt should start."""

    def remove(self, is_idle: bool) -> int:
        """Delete the terminating pods on lost nodes whose time is up and, while no driver needs them, the others, too.

        Returns the number of pods on lost nodes that are not ready.
        """
        suspects = [pod for pod in self._pods() if self._is_suspect(pod, is_idle)]
        nodes = self._api.find_all("Node") if suspects else []
        there = {node["metadata"]["name"]: loss_of(node) for node in nodes}
        losses = [(pod, there.get(pod["spec"]["nodeName"], GONE)) for pod in suspects]
        lost = [(pod, loss) for pod, loss in losses if loss and (loss.is_fault or not is_ready(pod))]
        faulty = {pod["spec"]["nodeName"]: loss.text for pod, loss in lost if loss.is_fault}
        self.faults = "; ".join(f"node {name}, where pods of the stage are, {text}" for name, text in faulty.items())
        before, now = self._lost_since, time.monotonic()
        self._lost_since = {pod["metadata"]["uid"]: before.get(pod["metadata"]["uid"], now) for pod, _ in lost}
        for pod, loss in lost:
            name, uid, grace = pod["metadata"]["name"], pod["metadata"]["uid"], grace_seconds(pod)
            where = f"pod {name} is on node {pod['spec']['nodeName']}, which {loss.text}"
            if now - self._lost_since[uid] > grace:
                self._api.delete("Pod", name, uid=uid, grace_seconds=0)
                self._report(f"{where}: removed by force")
            elif uid not in before:
                self._report(f"{where}: it has {grace:.0f} s to end, then it is removed by force")
        return sum(not is_ready(pod) for pod, _ in lost)

    def _pods(self) -> list[Object]:
        """Pods of the stage, of Ray heads, and of Jobs that end only after their pods: deploy Jobs and one-offs."""
        return self._api.find_all("Pod", f"{COMPONENT_LABEL} in ({self._stage},deploy,{ONE_OFF},head,isolated-head)")

    def _is_suspect(self, pod: Object, is_idle: bool) -> bool:
        """Whether the pod is terminating, or belongs to the stage while that has no driver that needs it."""
        metadata = pod["metadata"]
        is_idle = is_idle and metadata["labels"][COMPONENT_LABEL] == self._stage
        return bool(pod["spec"].get("nodeName")) and ("deletionTimestamp" in metadata or is_idle)


def loss_of(node: Object) -> Loss | None:
    """Why a node does not end its pods any more; None for a healthy node."""
    if UNREACHABLE in {taint["key"] for taint in node["spec"].get("taints") or []}:
        return Loss("is unreachable")
    conditions = {each["type"]: each for each in conditions_of(node)}
    if conditions.get("Ready", {}).get("status") != "True":
        return Loss("is not ready")
    for name, status in FAULTS.items():
        if (found := conditions.get(name, {})).get("status") == status:
            reason = f" ({found['reason']})" if found.get("reason") else ""
            return Loss(f"has a fault: {name} is {status}{reason}", is_fault=True)
    return None


def grace_seconds(pod: Object) -> float:
    """Seconds that the pod may take to end.

    The pod of a deploy Job gets less than it asks for: it loses no work, because the next one waits only for its end.
    """
    if pod["metadata"]["labels"].get(COMPONENT_LABEL) == "deploy":
        return GRACE_SECONDS
    asked = pod["metadata"].get("deletionGracePeriodSeconds")
    return float(pod["spec"]["terminationGracePeriodSeconds"] if asked is None else asked)
