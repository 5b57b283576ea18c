"""Checks whether worker group, queue and nodes have room for a gang. A check returns the problem, or empty text."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from deploy.stage_contract import size_variable
from k8s.objects.api import Api, Object
from k8s.objects.worker_group import WorkerGroup, quantity

WELL_KNOWN_LABELS = ("kubernetes.io/", "topology.kubernetes.io/")


def check_size(group: WorkerGroup, nodes: int) -> str:
    most = group.spec["maxReplicas"]
    if nodes <= most:
        return ""
    return (
        f"{size_variable(group.name)}={nodes}, but worker group {group.name} has maxReplicas {most}: raise the "
        f"MAX_NODES of its pool in the overlay's settings.env, which also sets the queue's capability, then: make "
        f"cluster-up"
    )


def check_queue(api: Api, group: WorkerGroup, nodes: int) -> str:
    queue = api.find("Queue", group.queue)
    if queue is None or (queue.get("status") or {}).get("state", "Open") != "Open":
        return f"queue {group.queue} is absent or not Open, so no gang enters it: make cluster-up, or open it"
    capability = {name: quantity(each) for name, each in (queue["spec"].get("capability") or {}).items()}
    short = [
        f"{name}: {_format(amount * nodes)} asked, {_format(capability[name])} in the queue"
        for name, amount in group.requests.items()
        if name in capability and amount * nodes > capability[name]
    ]
    if not short:
        return ""
    return (
        f"queue {group.queue} is too small for {nodes} {group.name} pods ({'; '.join(short)}): "
        f"raise the MAX_NODES of a pool in the overlay's settings.env, or deploy with fewer nodes"
    )


def check_nodes(api: Api, group: WorkerGroup, nodes: int) -> str:
    """Check that the nodes have room for so many pods of the stage, if nothing else runs on them."""
    room = count_room(api, group)
    if room >= nodes:
        return ""
    selected = _selected(api.find_all("Node"), group)
    taints = sorted({taint for node in selected for taint in _refusing_taints(_taints_of(node), group)})
    lacking = [name for name, amount in group.requests.items() if all(_allocatable(n, name) < amount for n in selected)]
    return (
        f"{len(selected)} nodes have the labels that {group.name} pods select "
        f"({_labels(group.pod.get('nodeSelector') or {})}), with room for {room} of {nodes}"
        + (f"; pods do not tolerate {', '.join(taints)}" if taints else "")
        + (f"; none has enough {', '.join(lacking)}" if selected and lacking else "")
        + ". Add nodes, or deploy with fewer"
    )


def check_fit(name: str, labels: dict[str, str], taints: Sequence[Object], group: WorkerGroup) -> str:
    """Check that a pod of the stage may run on the nodes of the node group `name`, by their labels and taints.

    Labels that every node has, such as that of its zone, are ignored.
    """
    wrong = {
        key: value
        for key, value in (group.pod.get("nodeSelector") or {}).items()
        if labels.get(key) != value and not key.startswith(WELL_KNOWN_LABELS)
    }
    if wrong:
        had = {key: labels.get(key, "nothing") for key in wrong}
        return f"nodes of {name} have {_labels(had)}, and {group.name} pods select {_labels(wrong)}"
    if refusing := _refusing_taints(taints, group):
        return f"nodes of {name} have taints that {group.name} pods do not tolerate: {', '.join(refusing)}"
    return ""


def count_room(api: Api, group: WorkerGroup) -> int:
    """Number of the stage's pods for which the present nodes would have room if nothing else ran on them."""
    nodes = _selected(api.find_all("Node"), group)
    return sum(_pods_that_fit(node, group) for node in nodes if not _refusing_taints(_taints_of(node), group))


def _selected(nodes: list[Object], group: WorkerGroup) -> list[Object]:
    selector = group.pod.get("nodeSelector") or {}
    return [node for node in nodes if selector.items() <= (node["metadata"].get("labels") or {}).items()]


def _pods_that_fit(node: Object, group: WorkerGroup) -> int:
    """Number of pods that fit into the whole node, because what runs on it now may leave."""
    fits = [int(_allocatable(node, name) // amount) for name, amount in group.requests.items() if amount > 0]
    return min(fits, default=0)


def _allocatable(node: Object, resource: str) -> Decimal:
    return quantity((node["status"].get("allocatable") or {}).get(resource, "0"))


def _taints_of(node: Object) -> list[Object]:
    return node["spec"].get("taints") or []


def _refusing_taints(taints: Sequence[Object], group: WorkerGroup) -> list[str]:
    tolerations = group.pod.get("tolerations") or []
    return [
        f"{taint['key']}:{taint['effect']}"
        for taint in taints
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(each, taint) for each in tolerations)
    ]


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def _labels(selector: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in selector.items()) or "any"


def _format(number: Decimal) -> str:
    """A number of bytes in GiB; every smaller number as it is."""
    return f"{number / 2**30:,.0f} GiB" if number >= 2**30 else f"{number:g}"
