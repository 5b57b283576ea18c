"""The node pool of a stage: static nodes, or an EKS managed node group that is scaled while the stage is deployed.

The size of a group is the size before any deployment raised it plus the shares of all stages. The group is raised no
further than that, never beyond its maximum, and is lowered only when the last share goes: EKS chooses which instances
of a group end, and might end those with another stage's pods. So a stage that leaves before others leaves its nodes,
too, and the last stage lowers the group to its size before the first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from deploy.exit_codes import EXIT_AGAIN
from deploy.reservation import explain_end
from k8s.objects.api import Api, Object
from k8s.objects.eks import (
    EksNodeGroup,
    NodeGroupAbsent,
    NodeGroupBusy,
    NodeGroupDenied,
    NodeGroupError,
    describe_node_group,
    describe_resize,
    resize_node_group,
)
from k8s.objects.names import NODE_POOLS, NODE_POOLS_ANNOTATION
from k8s.objects.node_shares import (
    PoolShares,
    ShareBook,
    count_ready_nodes,
    describe_holders,
    read_share_book,
    with_share,
)
from services.common.errors import DeviceError

LOOK_SECONDS = 15.0
"""Seconds between two calls that describe a group: EKS answers a few calls a second for a whole account."""
RELEASE_SECONDS = 600.0
"""Seconds of attempts to lower a pool, after which that is left to the reaper."""


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


class NodePool(Protocol):
    """The source of nodes for one stage's deployment. A call takes one step, and may be repeated."""

    def look(self, nodes: int) -> PoolState:
        """Observe the pool's progress towards so many nodes, without a change."""
        ...

    def hold(self, nodes: int) -> None:
        """Take the next step towards so many nodes."""
        ...

    def release(self) -> str:
        """Take the next step towards giving the nodes back, once the stage's pods are gone.

        Returns a sentence about the remaining work; empty when none is left.
        """
        ...


class StaticNodes:
    """Nodes that exist independently of deployments."""

    def look(self, nodes: int) -> PoolState:
        return PoolState()

    def hold(self, nodes: int) -> None:
        return None

    def release(self) -> str:
        return ""


class EksNodePool:
    """An EKS managed node group, which stages may share. Its methods raise `NodeGroupError` where EKS refuses."""

    def __init__(self, api: Api, stage: str, name: str, ends_at: str = "") -> None:
        self._api, self._stage, self._name = api, stage, name
        self._ends_at = ends_at
        self._seen: tuple[EksNodeGroup | None, float] = (None, 0.0)  # the group as EKS described it, and when
        self._denied: NodeGroupDenied | None = None
        self._is_busy = False
        self._rests_until = 0.0  # EKS answered that it was busy

    def look(self, nodes: int) -> PoolState:
        try:
            return self._look(nodes)
        except (NodeGroupDenied, NodeGroupAbsent) as error:
            return PoolState(is_raised=False, refusal=str(error))

    def _look(self, nodes: int) -> PoolState:
        if self._denied:
            raise self._denied
        if ended := explain_end(self._ends_at):
            return PoolState(is_raised=False, refusal=ended, exit_code=EXIT_AGAIN)
        shares = read_share_book(self._api).pools.get(self._name)
        group = self._describe()
        if shares is None or shares.nodes.get(self._stage) != nodes:
            wanted = with_share(shares, self._stage, nodes, group.desired_size)
            if wanted.size > group.max_size:
                return PoolState(is_raised=False, report=self._explain_room(group, wanted))
            return PoolState(is_raised=False, report=f"node group {self._name} will be asked for {nodes} nodes")
        if group.desired_size < shares.size:
            return PoolState(is_raised=False, report=self._explain_size(group, shares))
        return PoolState(report=self._explain_nodes(group, shares))

    def hold(self, nodes: int) -> None:
        """Write the share; in a later call, raise the group.

        The order and a new description of the group in between matter, because the last stage of the group may be
        lowering it at the moment.
        """
        # The shares are read before the group: if a share were removed after the group was described, the size would
        # count nodes that are being lowered, and no `Conflict` would show it.
        book = read_share_book(self._api)
        group = self._describe(is_fresh=True)
        shares = book.pools.get(self._name)
        if shares is None or shares.nodes.get(self._stage) != nodes:
            # A share beyond the group's maximum would keep other stages from raising the group for their own.
            wanted = with_share(shares, self._stage, nodes, group.desired_size)
            if wanted.size <= group.max_size:
                write_share(self._api, book, self._name, self._stage, nodes, group.desired_size)
                self._seen = (None, 0.0)
        elif group.desired_size < shares.size <= group.max_size and not self._is_resting():
            try:
                self._resize(shares.size)
            except NodeGroupDenied as error:
                self._denied = error
            # This process may have been suspended before the call for so long that another one took the stage down.
            if self._name not in read_share_book(self._api).pools:
                self._resize(max(shares.size_before, group.min_size))

    def release(self) -> str:
        book = read_share_book(self._api)
        shares = book.pools.get(self._name)
        if shares is None or self._stage not in shares.nodes:
            return ""
        if not shares.others_of(self._stage):
            try:
                group = self._describe(is_fresh=not self._is_resting())
            except NodeGroupAbsent as error:
                # Somebody deleted the group, or this pod looks for it in the wrong region or cluster.
                if ready := count_ready_nodes(self._api, self._name):
                    raise NodeGroupAbsent(
                        f"{error}. But {ready} nodes of it are ready, so nothing was lowered: correct REGION and "
                        f"CLUSTER_NAME in the overlay's settings.env, then: make cluster-up"
                    ) from error
                group = None  # nothing is left to lower
            if group and group.desired_size > (size := max(shares.size_before, group.min_size)):
                if not self._is_resting():
                    self._resize(size)
                return f"node group {self._name}: {group.desired_size} -> {size} nodes{self._busy_note()}"
        remove_share(self._api, book, self._name, self._stage)
        return ""

    def _describe(self, is_fresh: bool = False) -> EksNodeGroup:
        group, since = self._seen
        if group is None or is_fresh or time.monotonic() - since > LOOK_SECONDS:
            group = describe_node_group(self._name)
            self._seen = (group, time.monotonic())
        return group

    def _resize(self, desired: int) -> None:
        self._seen = (None, 0.0)
        self._is_busy = False
        try:
            resize_node_group(self._name, desired)
        except NodeGroupBusy:
            self._is_busy = True
            self._rests_until = time.monotonic() + LOOK_SECONDS

    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def _explain_room(self, group: EksNodeGroup, wanted: PoolShares) -> str:
        others = describe_holders(replace(wanted, nodes=wanted.others_of(self._stage)))
        held = f"; {others}" if others else ""
        return f"node group {self._name} would need {wanted.size} nodes, and has at most {group.max_size}{held}"

    def _explain_size(self, group: EksNodeGroup, shares: PoolShares) -> str:
        change = f"node group {self._name}: {group.desired_size} -> {shares.size} nodes"
        if shares.size > group.max_size:
            return f"{change}, but its maximum is {group.max_size}; {describe_holders(shares)}"
        return change + self._busy_note() + _describe_issues(group)

    def _busy_note(self) -> str:
        return ", after the update that EKS is making" if self._is_busy else ""

    def _explain_nodes(self, group: EksNodeGroup, shares: PoolShares) -> str:
        ready = count_ready_nodes(self._api, self._name)
        if ready >= shares.size:
            return ""
        return f"{ready} of {shares.size} nodes of node group {self._name} are ready" + _describe_issues(group)


def open_node_pool(api: Api, stage: str, name: str, ends_at: str = "") -> NodePool:
    """The pool of this name, an EKS managed node group (CLUSTER/GROUP), or static nodes for an empty name."""
    return EksNodePool(api, stage, name, ends_at) if name else StaticNodes()


class NodeRelease:
    """Gives back all nodes that a stage or a one-off holds, of the pools that its shares name.

    The worker group is not asked for its pool, which may have changed since.
    """

    def __init__(self, api: Api, stage: str) -> None:
        self._api, self._stage = api, stage
        self._pools: dict[str, NodePool] = {}

    def advance(self) -> str:
        """Take the next step, once the stage's pods are gone. Raises `NodeGroupError`.

        Returns a sentence about the remaining work; empty when none is left.
        """
        names = read_share_book(self._api).pools_of(self._stage)
        return "; ".join(filter(None, [self._pool(name).release() for name in names]))

    def _pool(self, name: str) -> NodePool:
        if name not in self._pools:
            self._pools[name] = open_node_pool(self._api, self._stage, name)
        return self._pools[name]


class PatientRelease:
    """Gives back all nodes of a stage or one-off, or leaves that to the reaper, which runs every 15 minutes."""

    def __init__(self, api: Api, holder: str, report: Callable[[str], None]) -> None:
        self._api, self._holder, self._report = api, holder, report
        self._release = NodeRelease(api, holder)
        self._since: float | None = None

    def advance(self) -> bool:
        """Take the next step. Returns True once the nodes are given back, or are left to the reaper.

        Raises `Conflict` and other errors of the Kubernetes API, after which it may be called again.
        """
        try:
            left = self._release.advance()
        except NodeGroupDenied as error:  # a second try would fail as well; the reaper has another role
            self._report(f"{error}. The nodes are left to the reaper. If EKS refuses it as well, lower them by hand:")
            for command in explain_lowering(self._api, self._holder):
                self._report(command)
            return True
        except NodeGroupError as error:
            left = str(error)
        if not left:
            return True
        self._report(left)
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since < RELEASE_SECONDS:
            return False
        self._report(f"after {RELEASE_SECONDS:.0f} s the nodes are left to the reaper, which lowers the pool")
        return True


def explain_lowering(api: Api, stage: str) -> list[str]:
    """The commands with which a person gives back the nodes of pools that this stage alone holds."""
    book = read_share_book(api)
    alone = [name for name in book.pools_of(stage) if not book.pools[name].others_of(stage)]
    return [describe_resize(name, book.pools[name].size_before) for name in alone]


def write_share(api: Api, book: ShareBook, pool: str, stage: str, nodes: int, size_before: int) -> None:
    """Write the stage's share of a pool. `size_before` is used for the pool's first share.

    Raises `Conflict` when the shares have changed since `book` was read.
    """
    _write(api, book, book.pools | {pool: with_share(book.pools.get(pool), stage, nodes, size_before)})


def remove_share(api: Api, book: ShareBook, pool: str, stage: str) -> None:
    """Remove the stage's share of a pool. Raises `Conflict` when the shares have changed since `book` was read."""
    others = book.pools[pool].others_of(stage)
    pools = {name: shares for name, shares in book.pools.items() if name != pool}
    _write(api, book, pools | ({pool: PoolShares(book.pools[pool].size_before, others)} if others else {}))


def _write(api: Api, book: ShareBook, pools: dict[str, PoolShares]) -> None:
    metadata: Object = {"name": NODE_POOLS, "annotations": {NODE_POOLS_ANNOTATION: _to_json(pools)}}
    body: Object = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
    if book.lease is None:
        api.create(body)
        return
    metadata["resourceVersion"] = book.lease["metadata"]["resourceVersion"]
    api.replace(body)


def _to_json(pools: dict[str, PoolShares]) -> str:
    return json.dumps({name: asdict(shares) for name, shares in pools.items()}, sort_keys=True)


def _describe_issues(group: EksNodeGroup) -> str:
    """The health issues that EKS reports for the group."""
    return "".join(f"; {issue}" for issue in group.issues)
