"""Describes the node pool of a stage: its cost, its reservation and its ready nodes.

The client needs no AWS account: the deploy Job checks the pool with EKS before it scales it up.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from deploy.client.outline import Outline
from deploy.reservation import RESERVATION_MARGIN, read_end
from k8s.objects.api import Api
from k8s.objects.deployment import Deployment
from k8s.objects.names import NAMESPACE
from k8s.objects.node_group import count_ready_nodes, describe_resize, find_holder, read_leases
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError
from services.common.recipe.schema import STAGES


def describe_cost(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    """Hours times price, or the price of an hour for a recipe without a limit; empty where there is no price."""
    price = group.dollars_per_node_hour
    if price is None:
        return ""
    hourly = deployment.nodes * price
    what = f"{deployment.nodes} x {group.instance_type or 'a node'} x ${price:,.2f} = ${hourly:,.2f} an hour"
    limits = []
    of_attempt, of_all = _attempt_hours(group, outline), deployment.limit_seconds / 3600
    if of_attempt and not 0 < of_all <= of_attempt:
        limits.append(f"{of_attempt:g} h by the recipe's time limit: ${hourly * of_attempt:,.2f} an attempt at most")
    if of_all:
        limits.append(f"{of_all:g} h by HOURS: ${hourly * of_all:,.2f} at most")
    return "; ".join([what, *limits]) if limits else f"{what}, for as long as the stage runs"


def describe_source(group: WorkerGroup, deployment: Deployment) -> str:
    """The node group that is scaled for the stage, and when it is scaled down; empty for static nodes."""
    if not group.node_pool:
        return ""
    after = "kept afterwards (KEEP=1)" if deployment.keep else "removed after it"
    return f"node group {group.node_pool}: {deployment.nodes} nodes are added for the stage and {after}"


def describe_reservation(group: WorkerGroup, deployment: Deployment, outline: Outline) -> str:
    """The end of the capacity reservation, and whether the stage's time limit exceeds it; empty without an end."""
    if not group.capacity_ends_at:
        return ""
    nodes_go_at = read_end(group.capacity_ends_at) - RESERVATION_MARGIN
    left = nodes_go_at - datetime.now(UTC)
    text = f"ends at {group.capacity_ends_at}; EKS removes the nodes from {nodes_go_at:%Y-%m-%dT%H:%MZ} on"
    text += f", {left / timedelta(hours=1):.1f} h from now" if left > timedelta(0) else ", which is past"
    limit = min(filter(None, (_attempt_hours(group, outline), deployment.limit_seconds / 3600)), default=0.0)
    if timedelta(hours=limit) > max(left, timedelta(0)):
        text += f". The time limit of {limit:g} h exceeds it: a later deployment continues from a checkpoint"
    return text


def _attempt_hours(group: WorkerGroup, outline: Outline) -> float | None:
    """The recipe's limit of an attempt, in hours; None where there is none. Only the trainer has one."""
    seconds = outline.train.time_limit_seconds if group.name == "trainer" else None
    return seconds / 3600 if seconds else None


def describe_pool(api: Api, name: str) -> str:
    """The node group's ready nodes and its holder, from the Kubernetes API."""
    return f"node group {name}: {count_ready_nodes(api, name)} ready, held by {find_holder(api, name) or 'nobody'}"


def require_nodes_given_back(api: Api) -> None:
    """Raise `DeviceError` while node groups are held: without the cluster nothing would scale them down."""
    if not (leases := read_leases(api)):
        return
    held = ", ".join(f"node group {lease.group} by {lease.holder}" for lease in leases)
    ends = [
        f"make stop-stage STAGE={lease.holder}"
        if lease.holder in STAGES
        else f"kubectl -n {NAMESPACE} delete job {lease.holder}"
        for lease in leases
    ]
    raise DeviceError(
        f"nodes are still held: {held}. {', '.join(ends)}, then wait for the reaper (make stage-status shows it), or "
        f"make cluster-down FORCE=1, which leaves the nodes running"
    )


def print_left_nodes(api: Api) -> None:
    """Print the node groups that nothing scales down any more, and the commands that do."""
    for lease in read_leases(api):
        print(f"left        node group {lease.group} is scaled up: {describe_resize(lease.group, 0)}", flush=True)
