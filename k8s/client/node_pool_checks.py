"""Checks and describes the node pool of a stage: its size and type, its cost, and its ready nodes.

The client needs no AWS account. A probe pod of the head's image reads the pool from EKS, with the rights of the deploy
Job. EKS has no call that tells whether a resize would be allowed; the deploy Job ends at once where it is not.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from deploy.client.outline import Outline
from deploy.reservation import RESERVATION_MARGIN, explain_end, read_end
from infra.shapes import Shape, read_shapes
from k8s.objects.api import Api, Object
from k8s.objects.capacity import check_fit
from k8s.objects.deployment import UPDATE_HEAD, Deployment
from k8s.objects.eks import USABLE, EksNodeGroup, describe_resize
from k8s.objects.names import EFA, INSTANCE_TYPE_LABEL, NAMESPACE, NEURON, REGION_ANNOTATION, SHAPE_LABEL
from k8s.objects.node_shares import (
    PoolShares,
    ShareBook,
    count_ready_nodes,
    describe_holders,
    read_share_book,
    with_share,
)
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError
from services.common.recipe.schema import STAGES


def check_reservation(group: WorkerGroup) -> str:
    return explain_end(group.capacity_ends_at)


def check_pool(api: Api, group: WorkerGroup, nodes: int, seen: dict[str, Any] | None) -> list[str]:
    """Problems of the pool for a stage on so many nodes. `seen` is the pool as the head's image described it."""
    if seen is None:
        return [
            f"worker group {group.name} has a node pool, but the head's image is too old for node pools: {UPDATE_HEAD}"
        ]
    if "problem" in seen:
        return [str(seen["problem"])]
    lists = {name: tuple(value) for name, value in seen.items() if isinstance(value, list)}
    pool = EksNodeGroup(**seen | lists)
    if pool.status not in USABLE:
        return [
            f"node group {pool.name} is {pool.status}, not ACTIVE: {'; '.join(pool.issues) or 'EKS gives no reason'}"
        ]
    shares = read_share_book(api).pools.get(pool.name)
    checks = [_check_size(group, nodes, pool, shares), _check_subnets(group, pool), *_check_fit(group, pool)]
    return list(filter(None, checks))


def describe_cost(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    """Hours times price, or the price of an hour for a recipe without a limit; empty where there is no price."""
    price = group.dollars_per_node_hour
    if price is None:
        return ""
    hourly = deployment.nodes * price
    what = f"{deployment.nodes} x {group.instance_type or 'a node'} x ${price:,.2f} = ${hourly:,.2f} an hour"
    limit = hours_limit(group, outline)
    if limit is None:
        return f"{what}, for as long as the stage runs"
    return f"{what}; {limit:g} h by the recipe's time limit: ${hourly * limit:,.2f} an attempt at most"


def describe_source(group: WorkerGroup, deployment: Deployment) -> str:
    """The node group that is scaled for the stage, and when it is scaled down; empty for static nodes."""
    if not group.node_pool:
        return ""
    after = "kept afterwards (KEEP=1)" if deployment.keep else "removed after it"
    return f"node group {group.node_pool}: {deployment.nodes} nodes are added for the stage and {after}"


def describe_reservation(group: WorkerGroup, outline: Outline) -> str:
    """The end of the capacity reservation, and whether the recipe's time limit exceeds it; empty without an end."""
    if not group.capacity_ends_at:
        return ""
    nodes_go_at = read_end(group.capacity_ends_at) - RESERVATION_MARGIN
    left = nodes_go_at - datetime.now(UTC)
    text = f"ends at {group.capacity_ends_at}; EKS removes the nodes from {nodes_go_at:%Y-%m-%dT%H:%MZ} on"
    text += f", {left / timedelta(hours=1):.1f} h from now" if left > timedelta(0) else ", which is past"
    limit = hours_limit(group, outline)
    if limit is not None and timedelta(hours=limit) > left:
        text += f". The recipe's time limit of {limit:g} h exceeds it: a later deployment continues from a checkpoint"
    return text


def hours_limit(group: WorkerGroup, outline: Outline) -> float | None:
    """The recipe's limit of an attempt, in hours; None where there is none. Only the trainer has one."""
    seconds = outline.train.time_limit_seconds if group.name == "trainer" else None
    return seconds / 3600 if seconds else None


def describe_pool(api: Api, book: ShareBook, stage: str, name: str) -> str:
    """The pool's ready nodes and their holders, from the Kubernetes API."""
    shares = book.pools.get(name)
    ready = count_ready_nodes(api, name)
    if shares is None:
        return f"node group {name}: no stage holds any, {ready} are ready"
    mine = "" if stage in shares.nodes else f", none by {stage}"
    return f"node group {name}: {ready} of {shares.size} are ready; {describe_holders(shares)}{mine}"


def require_nodes_given_back(api: Api) -> None:
    """Raise `DeviceError` while nodes of a pool are held: without the cluster nothing would scale the pool down."""
    pools = read_share_book(api).pools
    if not pools:
        return
    held = "; ".join(f"node group {name} ({describe_holders(shares)})" for name, shares in sorted(pools.items()))
    holders = sorted({holder for shares in pools.values() for holder in shares.nodes})
    raise DeviceError(
        f"nodes are still held in {held}: {', '.join(map(_command_to_end, holders))}, then wait for the reaper (make "
        f"stage-status shows it), or make cluster-down FORCE=1, which leaves the nodes running"
    )


def require_same_region(api: Api, rendered: Object, live: Object) -> None:
    """Raise `DeviceError` for a changed region while nodes are held: the old region's pool would stay scaled up."""
    before, after = (each["metadata"].get("annotations", {}).get(REGION_ANNOTATION, "") for each in (live, rendered))
    if before == after:
        return
    held = sorted({stage for shares in read_share_book(api).pools.values() for stage in shares.nodes})
    if held:
        raise DeviceError(
            f"REGION changes from {before or 'nothing'} to {after or 'nothing'}, and {' and '.join(held)} still holds "
            f"nodes in the old region (make stage-status), which nothing would remove: {_command_to_end(held[0])}, "
            f"wait for the reaper, then repeat the command. Nothing was applied."
        )


def _command_to_end(holder: str) -> str:
    """The command that ends a holder of nodes: a stage, or a one-off by the name of its Job."""
    return f"make stop-stage STAGE={holder}" if holder in STAGES else f"kubectl -n {NAMESPACE} delete job {holder}"


def print_left_nodes(api: Api) -> None:
    """Print the nodes that nothing removes any more, and the commands that do."""
    for name, shares in read_share_book(api).pools.items():
        print(
            f"left        node group {name} has {shares.size - shares.size_before} nodes that are paid for and that "
            f"nothing removes: {describe_resize(name, shares.size_before)}",
            flush=True,
        )


def _check_size(group: WorkerGroup, nodes: int, pool: EksNodeGroup, shares: PoolShares | None) -> str:
    """The reason why the pool cannot have the size that the deploy Job will request; empty where it can."""
    wanted = with_share(shares, group.name, nodes, pool.desired_size)
    if wanted.size <= pool.max_size:
        return ""
    others = describe_holders(replace(wanted, nodes=wanted.others_of(group.name)))
    held = f" ({others})" if others else ""
    return (
        f"NODES={nodes} needs {wanted.size} nodes of node group {pool.name}{held}, whose limit is {pool.max_size}: use "
        f"fewer NODES, or raise {_variable_of(group)}.max_nodes of the infrastructure (make infra-up)"
    )


def _variable_of(group: WorkerGroup) -> str:
    return "trainium" if NEURON in group.requests else "cpu_nodes"


def _check_subnets(group: WorkerGroup, pool: EksNodeGroup) -> str:
    """The reason why a gang with EFA, which does not leave a subnet, cannot use the pool's; empty where it can."""
    if EFA not in group.requests or len(pool.subnets) <= 1:
        return ""
    return (
        f"node group {pool.name} has the {len(pool.subnets)} subnets {', '.join(pool.subnets)}, so a gang of "
        f"{group.name} pods could straddle zones, and EFA does not leave a subnet (expected: one subnet)"
    )


def _check_fit(group: WorkerGroup, pool: EksNodeGroup) -> list[str]:
    """The reason why the stage's pods do not fit on the pool's nodes, for each of its instance types.

    EKS reports no instance type where a launch template sets it, as ours does; a label of the node group has it then. A
    group with neither is assumed to have the overlay's type.
    """
    shapes, labelled = read_shapes(), pool.labels.get(SHAPE_LABEL, "")
    types = pool.instance_types or tuple(filter(None, [labelled])) or (group.instance_type,)
    others = [each for each in types if group.instance_type and each != group.instance_type]
    if others:
        return [
            f"node group {pool.name} has nodes of type {', '.join(others)}, but {group.name} pods are sized for "
            f"{group.instance_type}: set {_variable_of(group)}.shape of the infrastructure and _SHAPE in the overlay's "
            f"settings.env to one type (make infra-up writes both), then: make cluster-up"
        ]
    return [problem for each in types if (problem := check_fit(_node_of(pool, each, shapes.get(each)), group))]


def _node_of(pool: EksNodeGroup, instance_type: str, shape: Shape | None) -> Object:
    """A node as the pool would create it. Allocatable resources are known only for types of infra/shapes.json."""
    labels = pool.labels | {INSTANCE_TYPE_LABEL: instance_type}
    node: Object = {"metadata": {"name": pool.name, "labels": labels}, "spec": {"taints": list(pool.taints)}}
    return node | {"status": {"allocatable": _allocatable(shape) if shape else None}}


def _allocatable(shape: Shape) -> dict[str, str]:
    if shape.pod is None:
        raise DeviceError(f"no stage runs on {shape.name}: infra/shapes.json has no resources of a pod for it")
    return {
        "cpu": str(shape.pod.cpus),
        "memory": f"{shape.pod.memory_gib}Gi",
        "ephemeral-storage": f"{shape.pod.storage_gib}Gi",
        "hugepages-2Mi": f"{shape.pod.huge_pages_gib}Gi",
        NEURON: str(shape.neuron_devices),
        EFA: str(shape.efa_cards),
    }
