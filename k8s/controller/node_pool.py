"""The node pool of a stage: static nodes, or an EKS managed node group that is scaled up while the stage is deployed.

One stage or one-off at a time holds a node group, by the group's Lease. It scales the group up to its own nodes, and
down to the group's minimum after its pods are gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.exit_codes import EXIT_AGAIN
from deploy.reservation import explain_end
from k8s.controller.node_pool_checks import check_pool
from k8s.objects.api import Api
from k8s.objects.node_group import (
    EksNodeGroup,
    EksUnreachable,
    NodeGroupAbsent,
    NodeGroupBusy,
    NodeGroupDenied,
    NodeGroupError,
    count_ready_nodes,
    describe_node_group,
    describe_resize,
    find_holder,
    read_leases,
    resize_node_group,
    take_lease,
)
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import DeviceError

DESCRIBE_SECONDS = 15.0
"""Seconds between two calls that describe a group, and before a busy EKS is asked again: EKS answers a few calls a
second for a whole account."""


@dataclass(frozen=True)
class PoolState:
    """The progress of a pool towards the nodes of a deployment."""

    is_raised: bool = True
    """Whether the pool was asked for all nodes, which may still be starting."""
    report: str = ""
    """A sentence about the next step or the nodes that are not ready; empty when all are."""
    refusal: str = ""
    """The reason why the pool will never have the nodes; empty when there is none."""
    exit_code: int = DeviceError.exit_code
    """The exit code of a deployment that ends for `refusal`."""


class NodePool:
    """The nodes of one holder, a stage or a one-off: static ones for an empty name, else those of CLUSTER/GROUP."""

    def __init__(self, api: Api, holder: str, name: str, ends_at: str = "") -> None:
        self._api, self._holder, self._name = api, holder, name
        self._ends_at = ends_at
        self._described: tuple[EksNodeGroup | None, float] = (None, 0.0)  # as EKS described it, and when
        self._denied = ""
        self._note = ""
        self._rests_until = 0.0  # EKS was busy

    def observe(self, nodes: int, stage: WorkerGroup | None = None) -> PoolState:
        """Observe the pool's progress towards so many nodes, without a change. Raises `NodeGroupError`.

        A pool that must be scaled up is refused where it does not fit the worker group `stage`.
        """
        if not self._name:
            return PoolState()
        if ended := explain_end(self._ends_at):
            return PoolState(is_raised=False, refusal=ended, exit_code=EXIT_AGAIN)
        holder = find_holder(self._api, self._name)
        if holder not in ("", self._holder):
            return PoolState(is_raised=False, report=f"node group {self._name} is held by {holder}")
        try:
            group = self._describe()
        except (NodeGroupBusy, EksUnreachable):
            raise
        except NodeGroupError as error:
            return PoolState(is_raised=False, refusal=str(error))
        must_rise = not holder or group.desired_size < nodes
        refusal = self._denied or (check_pool(stage, nodes, group) if stage and must_rise else "")
        if not refusal and nodes > group.max_size:
            refusal = f"node group {self._name} has at most {group.max_size} nodes, and {nodes} are needed"
        if refusal:
            return PoolState(is_raised=False, refusal=refusal)
        issues = "".join(f"; {issue}" for issue in group.issues)
        if must_rise:
            report = f"node group {self._name}: {group.desired_size} -> {max(nodes, group.desired_size)} nodes"
            return PoolState(is_raised=False, report=report + self._note + issues)
        ready = count_ready_nodes(self._api, self._name)
        return PoolState(
            report=f"{ready} of {nodes} nodes of node group {self._name} are ready{issues}" if ready < nodes else ""
        )

    def hold(self, nodes: int) -> None:
        """Take the group's Lease and scale the group up, unless somebody else holds it or EKS was busy just now.

        Raises `NodeGroupError`, and `Conflict` where somebody else takes the Lease at the same time.
        """
        if time.monotonic() < self._rests_until:
            return
        holder = find_holder(self._api, self._name)
        if holder not in ("", self._holder):
            return
        if not holder:
            take_lease(self._api, self._name, self._holder)
        if self._describe(is_fresh=True).desired_size < nodes:
            self._resize(nodes)

    def _resize(self, nodes: int) -> None:
        self._note = ""
        try:
            resize_node_group(self._name, nodes)
        except NodeGroupBusy:
            self._note = ", after the update that EKS is making"
            self._rests_until = time.monotonic() + DESCRIBE_SECONDS
        except NodeGroupDenied as error:
            self._denied = str(error)
        else:
            self._described = (None, 0.0)

    def _describe(self, is_fresh: bool = False) -> EksNodeGroup:
        group, since = self._described
        if group is None or is_fresh or time.monotonic() - since > DESCRIBE_SECONDS:
            group = describe_node_group(self._name)
            self._described = (group, time.monotonic())
        return group


def release_node_groups(api: Api, holder: str, report: Callable[[str], None]) -> None:
    """Scale every node group that a stage or one-off holds down to its minimum, and give up its Lease.

    Raises `NodeGroupError`, after which it may be called again.
    """
    for lease in read_leases(api):
        if lease.holder != holder:
            continue
        try:
            group = describe_node_group(lease.group)
            if group.desired_size > group.min_size:
                report(f"node group {lease.group}: {group.desired_size} -> {group.min_size} nodes")
                resize_node_group(lease.group, group.min_size)
        except NodeGroupAbsent as error:
            if ready := count_ready_nodes(api, lease.group):
                raise NodeGroupAbsent(
                    f"{error}. But {ready} nodes of it are ready, so nothing was scaled down: correct REGION and "
                    f"CLUSTER_NAME in the overlay's settings.env, then: make cluster-up"
                ) from error
        api.delete("Lease", lease.name, uid=lease.uid)


def describe_release(api: Api, holder: str) -> str:
    """Say that the reaper scales down what is still held, and with which commands a person does."""
    commands = [describe_resize(lease.group, 0) for lease in read_leases(api) if lease.holder == holder]
    return f"The nodes are left to the reaper. If EKS refuses it as well, scale them down: {'; '.join(commands)}"
