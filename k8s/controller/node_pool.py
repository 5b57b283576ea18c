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
from k8s.objects.api import Api
from k8s.objects.capacity import check_fit
from k8s.objects.names import EFA, INSTANCE_TYPE_LABEL, SHAPE_LABEL
from k8s.objects.node_group import (
    USABLE,
    EksBusy,
    EksNodeGroup,
    NodeGroupAbsent,
    NodeGroupError,
    NodeGroupLease,
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

PAUSE_SECONDS = 15.0
"""Seconds between two calls that describe a group, and before EKS is called again after it was busy. EKS answers a few
calls a second for a whole account, so one holder makes at most two calls in this time."""
RELEASE_SECONDS = 600.0
"""Seconds of attempts to scale a group down while EKS is busy, after which that is left to the reaper."""


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

    def __init__(self, api: Api, holder: str, name: str, report: Callable[[str], None], ends_at: str = "") -> None:
        self._api, self._holder, self._name, self._report, self._ends_at = api, holder, name, report, ends_at
        self._described: tuple[EksNodeGroup | None, float] = (None, 0.0)  # as EKS described it, and when
        self._refusal = ""  # why EKS did not resize the group
        self._busy, self._rests_until = "", 0.0  # why EKS could not serve the last call, and until when it rests
        self._releasing_since: float | None = None

    def observe(self, nodes: int, stage: WorkerGroup | None = None) -> PoolState:
        """Observe the pool's progress towards so many nodes, without a change.

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
        except EksBusy as error:
            self._rest(error)
            return PoolState(is_raised=False, report=str(error))
        except NodeGroupError as error:
            return PoolState(is_raised=False, refusal=str(error))
        must_rise = not holder or group.desired_size < nodes
        refusal = self._refusal or (check_pool(stage, group) if stage and must_rise else "")
        if not refusal and nodes > group.max_size:
            refusal = (
                f"node group {self._name} has at most {group.max_size} nodes, and {nodes} are needed: use fewer, or "
                f"raise max_nodes of the infrastructure (make infra-up)"
            )
        if refusal:
            return PoolState(is_raised=False, refusal=refusal)
        issues = "".join(f"; {issue}" for issue in group.issues)
        if must_rise:
            busy = f"; {self._busy}" if self._is_resting else ""
            report = f"node group {self._name}: {group.desired_size} -> {max(nodes, group.desired_size)} nodes"
            return PoolState(is_raised=False, report=report + busy + issues)
        ready = count_ready_nodes(self._api, self._name)
        return PoolState(
            report=f"{ready} of {nodes} nodes of node group {self._name} are ready{issues}" if ready < nodes else ""
        )

    def hold(self, nodes: int) -> None:
        """Take the group's Lease and scale the group up, unless somebody else holds it or EKS was busy just now.

        Raises `Conflict` where somebody else takes the Lease at the same time.
        """
        holder = find_holder(self._api, self._name)
        if holder not in ("", self._holder) or self._is_resting:
            return
        if not holder:
            take_lease(self._api, self._name, self._holder)
        try:
            if self._describe(is_fresh=True).desired_size < nodes:
                resize_node_group(self._name, nodes)
                self._described = (None, 0.0)
        except EksBusy as error:
            self._rest(error)
        except NodeGroupError as error:
            self._refusal = str(error)

    def release(self) -> bool:
        """Scale every node group that the holder has down to its minimum, and give up its Lease.

        Returns False while EKS is busy. After `RELEASE_SECONDS` of that, or when EKS refuses, a group keeps its Lease,
        by which the reaper scales it down.
        """
        for lease in read_leases(self._api):
            if lease.holder != self._holder:
                continue
            if self._is_resting:
                return False
            try:
                self._scale_down(lease)
            except NodeGroupError as error:
                self._releasing_since = self._releasing_since or time.monotonic()
                if isinstance(error, EksBusy) and time.monotonic() - self._releasing_since < RELEASE_SECONDS:
                    self._rest(error)
                    self._report(str(error))
                    return False
                by_hand = describe_resize(lease.group, 0)
                self._report(f"{error}. The reaper tries again every 5 minutes. If EKS refuses it as well: {by_hand}")
        return True

    def _scale_down(self, lease: NodeGroupLease) -> None:
        try:
            group = describe_node_group(lease.group)
            if group.desired_size > group.min_size:
                self._report(f"node group {lease.group}: {group.desired_size} -> {group.min_size} nodes")
                resize_node_group(lease.group, group.min_size)
        except NodeGroupAbsent as error:
            if ready := count_ready_nodes(self._api, lease.group):
                raise NodeGroupAbsent(
                    f"{error}. But {ready} nodes of it are ready, so nothing was scaled down: correct REGION and "
                    f"CLUSTER_NAME in the overlay's settings.env, then: make cluster-up"
                ) from error
        self._api.delete("Lease", lease.name, uid=lease.uid)

    def _describe(self, is_fresh: bool = False) -> EksNodeGroup:
        group, since = self._described
        if group is None or is_fresh or time.monotonic() - since > PAUSE_SECONDS:
            if self._is_resting:
                raise EksBusy(self._busy)
            group = describe_node_group(self._name)
            self._described = (group, time.monotonic())
        return group

    @property
    def _is_resting(self) -> bool:
        """Whether EKS was busy just now, and is not called."""
        return time.monotonic() < self._rests_until

    def _rest(self, error: EksBusy) -> None:
        if not self._is_resting:
            self._busy, self._rests_until = str(error), time.monotonic() + PAUSE_SECONDS


def check_pool(stage: WorkerGroup, pool: EksNodeGroup) -> str:
    """The reasons why the stage's pods cannot run on the pool's nodes; empty where they can.

    EKS reports no instance type where a launch template sets it, as ours does; a label of the node group has it then.
    Pods are as large as a node of their instance type.
    """
    if pool.status not in USABLE:
        return f"node group {pool.name} is {pool.status}, not ACTIVE: {'; '.join(pool.issues) or 'EKS gives no reason'}"
    reasons = []
    if EFA in stage.requests and len(pool.subnets) > 1:
        reasons.append(
            f"node group {pool.name} has the subnets {', '.join(pool.subnets)} (expected: one), so a gang of "
            f"{stage.name} pods could straddle zones, and EFA does not leave a subnet"
        )
    types = pool.instance_types or (pool.labels.get(SHAPE_LABEL, ""),)
    if others := [each for each in types if each and stage.instance_type and each != stage.instance_type]:
        reasons.append(
            f"node group {pool.name} has nodes of type {', '.join(others)}, but {stage.name} pods are sized for "
            f"{stage.instance_type}: set the shape of the infrastructure and _SHAPE in the overlay's settings.env to "
            f"one type (make infra-up writes both), then: make cluster-up"
        )
    labels = pool.labels | {INSTANCE_TYPE_LABEL: stage.instance_type}
    return "; ".join(filter(None, [*reasons, check_fit(pool.name, labels, pool.taints, stage)]))
