"""The node pool of a stage as a client sees it: what is wrong with it, what it will cost, how far it is.

A client needs no AWS account: the head's image says in a short pod how EKS describes the pool, with the rights that the
deploy Job will have. EKS cannot be asked whether a resize would be allowed; the deploy Job ends at once when it is not.
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
from k8s.objects.eks import USABLE, NodeGroup, describe_resize
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
    """Will the pool have so many nodes that the stage's pods can go to? `seen` is what the head's image said of it."""
    if seen is None:
        return [f"the head's image knows no node pools, and worker group {group.name} is to have one: {UPDATE_HEAD}"]
    if "problem" in seen:
        return [str(seen["problem"])]
    lists = {name: tuple(value) for name, value in seen.items() if isinstance(value, list)}
    pool = NodeGroup(**seen | lists)
    if pool.status not in USABLE:
        return [f"node group {pool.name} is {pool.status}, not ACTIVE: {'; '.join(pool.issues) or 'EKS says no more'}"]
    shares = read_share_book(api).pools.get(pool.name)
    checks = [_check_size(group, nodes, pool, shares), _check_subnets(group, pool), *_check_fit(group, pool)]
    return list(filter(None, checks))


def describe_cost(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    """Hours x price; hours where the recipe limits them. Empty where the manifests say no price."""
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
    """Where the nodes come from, and when they go again."""
    if not group.node_pool:
        return ""
    after = "stay afterwards (KEEP=1)" if deployment.keep else "go after it"
    return f"node group {group.node_pool}: {deployment.nodes} nodes come for the stage and {after}"


def describe_reservation(group: WorkerGroup, outline: Outline) -> str:
    """When the nodes go whatever runs, and whether the recipe would go on beyond that."""
    if not group.capacity_ends_at:
        return ""
    nodes_go_at = read_end(group.capacity_ends_at) - RESERVATION_MARGIN
    left = nodes_go_at - datetime.now(UTC)
    told = f"ends at {group.capacity_ends_at}; EKS takes the nodes from {nodes_go_at:%Y-%m-%dT%H:%MZ} on"
    told += f", {left / timedelta(hours=1):.1f} h from now" if left > timedelta(0) else ", which is over"
    limit = hours_limit(group, outline)
    if limit is not None and timedelta(hours=limit) > left:
        told += f". The recipe's time limit of {limit:g} h goes beyond: what is not done then goes on from a checkpoint"
    return told


def hours_limit(group: WorkerGroup, outline: Outline) -> float | None:
    """Of an attempt. The trainer's recipe says one; the time that the others need nobody knows beforehand."""
    seconds = outline.train.time_limit_seconds if group.name == "trainer" else None
    return seconds / 3600 if seconds else None


def describe_pool(api: Api, book: ShareBook, stage: str, name: str) -> str:
    """How far the pool is, by what Kubernetes knows of it."""
    shares = book.pools.get(name)
    ready = count_ready_nodes(api, name)
    if shares is None:
        return f"node group {name}: no stage holds any, {ready} are ready"
    mine = "" if stage in shares.nodes else f", none by {stage}"
    return f"node group {name}: {ready} of {shares.size} are ready; {describe_holders(shares)}{mine}"


def require_nodes_given_back(api: Api) -> None:
    """Raises `DeviceError` while anybody holds nodes of a pool: without the cluster's objects nobody would lower it."""
    pools = read_share_book(api).pools
    if not pools:
        return
    held = "; ".join(f"node group {name} ({describe_holders(shares)})" for name, shares in sorted(pools.items()))
    holders = sorted({holder for shares in pools.values() for holder in shares.nodes})
    raise DeviceError(
        f"nodes are still held of {held}: {', '.join(map(_command_to_end, holders))}, then wait for the reaper (make "
        f"stage-status tells), or make cluster-down FORCE=1, which leaves them running"
    )


def require_same_region(api: Api, rendered: Object, live: Object) -> None:
    """Raises `DeviceError` for another region while anybody holds nodes: there nobody would find the pool to lower."""
    before, after = (each["metadata"].get("annotations", {}).get(REGION_ANNOTATION, "") for each in (live, rendered))
    if before == after:
        return
    held = sorted({stage for shares in read_share_book(api).pools.values() for stage in shares.nodes})
    if held:
        raise DeviceError(
            f"REGION changes from {before or 'nothing'} to {after or 'nothing'}, and {' and '.join(held)} still holds "
            f"nodes there (make stage-status), which nobody would lower: {_command_to_end(held[0])}, wait for the "
            f"reaper, then run this again. Nothing was applied."
        )


def _command_to_end(holder: str) -> str:
    """The command that ends what holds nodes: a stage, or a one-off by the name of its Job."""
    return f"make stop-stage STAGE={holder}" if holder in STAGES else f"kubectl -n {NAMESPACE} delete job {holder}"


def tell_left_nodes(api: Api) -> None:
    """What nobody lowers any more, and the command that does."""
    for name, shares in read_share_book(api).pools.items():
        print(
            f"left        node group {name} has {shares.size - shares.size_before} nodes that are paid for and that "
            f"nobody lowers: {describe_resize(name, shares.size_before)}",
            flush=True,
        )


def _check_size(group: WorkerGroup, nodes: int, pool: NodeGroup, shares: PoolShares | None) -> str:
    """The sum that the deploy Job will ask for."""
    wanted = with_share(shares, group.name, nodes, pool.desired)
    if wanted.size <= pool.most:
        return ""
    others = describe_holders(replace(wanted, nodes=wanted.others_of(group.name)))
    held = f" ({others})" if others else ""
    return (
        f"NODES={nodes} makes {wanted.size} nodes of node group {pool.name}{held}, which may have {pool.most}: deploy "
        f"with fewer NODES, or raise {_variable_of(group)}.max_nodes of the infrastructure (make infra-up)"
    )


def _variable_of(group: WorkerGroup) -> str:
    return "trainium" if NEURON in group.requests else "cpu_nodes"


def _check_subnets(group: WorkerGroup, pool: NodeGroup) -> str:
    """EFA does not leave a subnet, and a gang in two of them may be in two zones."""
    if EFA not in group.requests or len(pool.subnets) <= 1:
        return ""
    return (
        f"node group {pool.name} has the {len(pool.subnets)} subnets {', '.join(pool.subnets)}, so a gang of "
        f"{group.name} pods could straddle zones, and EFA does not leave a subnet (expected: one subnet)"
    )


def _check_fit(group: WorkerGroup, pool: NodeGroup) -> list[str]:
    """Would a pod of the stage go to a node of the pool, whatever type of its instances that is?

    EKS tells no type of a group whose launch template sets it, as ours; then the group's label does. A group with
    neither is taken to have the type that the overlay says.
    """
    shapes, labelled = read_shapes(), pool.labels.get(SHAPE_LABEL, "")
    types = pool.instance_types or tuple(filter(None, [labelled])) or (group.instance_type,)
    others = [each for each in types if group.instance_type and each != group.instance_type]
    if others:
        return [
            f"node group {pool.name} makes nodes of {', '.join(others)}, and {group.name} pods are sized for "
            f"{group.instance_type}: set {_variable_of(group)}.shape of the infrastructure and _SHAPE in the overlay's "
            f"settings.env to one type (make infra-up writes both), then: make cluster-up"
        ]
    return [problem for each in types if (problem := check_fit(_node_of(pool, each, shapes.get(each)), group))]


def _node_of(pool: NodeGroup, instance_type: str, shape: Shape | None) -> Object:
    """A node as the pool would make it. What a type leaves to pods is known of those in the table alone."""
    labels = pool.labels | {INSTANCE_TYPE_LABEL: instance_type}
    node: Object = {"metadata": {"name": pool.name, "labels": labels}, "spec": {"taints": list(pool.taints)}}
    return node | {"status": {"allocatable": _allocatable(shape) if shape else None}}


def _allocatable(shape: Shape) -> dict[str, str]:
    if shape.pod is None:
        raise DeviceError(
            f"no stage runs on {shape.name}: infra/shapes.json says nothing of what such a node leaves to a pod"
        )
    return {
        "cpu": str(shape.pod.cpus),
        "memory": f"{shape.pod.memory_gib}Gi",
        "ephemeral-storage": f"{shape.pod.storage_gib}Gi",
        "hugepages-2Mi": f"{shape.pod.huge_pages_gib}Gi",
        NEURON: str(shape.neuron_devices),
        EFA: str(shape.efa_cards),
    }
