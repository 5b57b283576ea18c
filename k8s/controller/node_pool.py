"""The pool that a stage's nodes come from. They are simply there, or an EKS managed node group has them for as long as
the stage is deployed.

A group is to have the nodes that it had before any deployment raised it, and the sum of the stages' shares. It is
raised only up to that, never beyond its maximum, and lowered only when the last share goes: EKS, and nobody else,
chooses which instances of a group end, and would end those on which another stage's pods are. So a stage that leaves
others behind leaves its nodes, too, and the last one lowers the group to what it was before the first.
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

LOOK_SECONDS = 15.0  # EKS answers a few calls a second for a whole account
RELEASE_SECONDS = 600.0  # for which a pool that cannot be lowered is tried again, before it is left to the reaper


@dataclass(frozen=True)
class PoolState:
    """How far a pool is with the nodes of a deployment."""

    is_raised: bool = True
    """Has it been asked for all of them? They may be starting still."""
    report: str = ""
    """What is still to be done, or waited for."""
    refusal: str = ""
    """Why it will not have them."""
    exit_code: int = DeviceError.exit_code
    """That a refusal stands for."""


class NodePool(Protocol):
    """Where the nodes of one stage's deployment come from. Each call does the one next thing, and may be repeated."""

    def look(self, nodes: int) -> PoolState:
        """How far it is with so many nodes."""
        ...

    def hold(self, nodes: int) -> None:
        """Do the next thing towards having them."""
        ...

    def release(self) -> str:
        """Do the next thing towards having them no more; what is still to be done, or empty. Its pods are gone."""
        ...


class StandingNodes:
    """Nodes that are there, whoever brought them."""

    def look(self, nodes: int) -> PoolState:
        return PoolState()

    def hold(self, nodes: int) -> None:
        return None

    def release(self) -> str:
        return ""


class EksNodePool:
    """An EKS managed node group, which other stages may share. Raises `NodeGroupError` where EKS refuses."""

    def __init__(self, api: Api, stage: str, name: str, ends_at: str = "") -> None:
        self._api, self._stage, self._name = api, stage, name
        self._ends_at = ends_at
        self._seen: tuple[EksNodeGroup | None, float] = (None, 0.0)  # as EKS described it, and when
        self._denied: NodeGroupDenied | None = None
        self._is_busy = False
        self._rests_until = 0.0  # after an answer that EKS has other things to do

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
            wanted = with_share(shares, self._stage, nodes, group.desired)
            if wanted.size > group.most:
                return PoolState(is_raised=False, report=self._explain_room(group, wanted))
            return PoolState(is_raised=False, report=f"{nodes} nodes of node group {self._name} are to come")
        if group.desired < shares.size:
            return PoolState(is_raised=False, report=self._explain_size(group, shares))
        return PoolState(report=self._explain_nodes(group, shares))

    def hold(self, nodes: int) -> None:
        """Write the share; once it is there, raise the group.

        In this order, and with a new look at the group in between: a stage that was the last one there may be lowering
        it at the moment.
        """
        # The book first: were a share removed after the look at the group, the size seen there would be that of nodes
        # on their way out, and no Conflict would tell.
        book = read_share_book(self._api)
        group = self._describe(is_fresh=True)
        shares = book.pools.get(self._name)
        if shares is None or shares.nodes.get(self._stage) != nodes:
            # A share that the group can never hold would keep other stages from raising it for what they may have.
            wanted = with_share(shares, self._stage, nodes, group.desired)
            if wanted.size <= group.most:
                write_share(self._api, book, self._name, self._stage, nodes, group.desired)
                self._seen = (None, 0.0)
        elif group.desired < shares.size <= group.most and not self._is_resting():
            try:
                self._resize(shares.size)
            except NodeGroupDenied as error:
                self._denied = error
            # This process may have slept for so long before the call that another one took the stage down.
            if self._name not in read_share_book(self._api).pools:
                self._resize(max(shares.size_before, group.least))

    def release(self) -> str:
        book = read_share_book(self._api)
        shares = book.pools.get(self._name)
        if shares is None or self._stage not in shares.nodes:
            return ""
        if not shares.others_of(self._stage):
            try:
                group = self._describe(is_fresh=not self._is_resting())
            except NodeGroupAbsent as error:
                # Deleted by hand, or looked for in another region or cluster than the one that it is in.
                if ready := count_ready_nodes(self._api, self._name):
                    raise NodeGroupAbsent(
                        f"{error}. Yet {ready} nodes of it are ready, so they are lowered nowhere: mend REGION and "
                        f"CLUSTER_NAME in the overlay's settings.env, then: make cluster-up"
                    ) from error
                group = None  # there is nothing to lower
            if group and group.desired > (size := max(shares.size_before, group.least)):
                if not self._is_resting():
                    self._resize(size)
                return f"node group {self._name}: {group.desired} -> {size} nodes{self._busy_note()}"
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
        return f"node group {self._name} would have {wanted.size} nodes, and may have {group.most}{held}"

    def _explain_size(self, group: EksNodeGroup, shares: PoolShares) -> str:
        change = f"node group {self._name}: {group.desired} -> {shares.size} nodes"
        if shares.size > group.most:
            return f"{change}, of which it may have {group.most}; {describe_holders(shares)}"
        return change + self._busy_note() + _describe_issues(group)

    def _busy_note(self) -> str:
        return ", when the update that EKS makes of it has ended" if self._is_busy else ""

    def _explain_nodes(self, group: EksNodeGroup, shares: PoolShares) -> str:
        ready = count_ready_nodes(self._api, self._name)
        if ready >= shares.size:
            return ""
        return f"{ready} of {shares.size} nodes of node group {self._name} are ready" + _describe_issues(group)


def open_node_pool(api: Api, stage: str, name: str, ends_at: str = "") -> NodePool:
    """The pool of that name: an EKS managed node group (CLUSTER/GROUP), or none (empty). Nothing is asked yet."""
    return EksNodePool(api, stage, name, ends_at) if name else StandingNodes()


class NodeRelease:
    """Gives back all nodes that a stage or a one-off holds, of whatever pool: the shares name it, and not the worker
    group of now."""

    def __init__(self, api: Api, stage: str) -> None:
        self._api, self._stage = api, stage
        self._pools: dict[str, NodePool] = {}

    def advance(self) -> str:
        """Do the next thing; what is still to be done, or empty. The stage's pods are gone. Raises `NodeGroupError`."""
        names = read_share_book(self._api).pools_of(self._stage)
        return "; ".join(filter(None, [self._pool(name).release() for name in names]))

    def _pool(self, name: str) -> NodePool:
        if name not in self._pools:
            self._pools[name] = open_node_pool(self._api, self._stage, name)
        return self._pools[name]


class PatientRelease:
    """Gives back all nodes of a holder, or leaves that to the reaper, which comes every quarter of an hour."""

    def __init__(self, api: Api, holder: str, report: Callable[[str], None]) -> None:
        self._api, self._holder, self._report = api, holder, report
        self._release = NodeRelease(api, holder)
        self._since: float | None = None

    def advance(self) -> bool:
        """Do the next thing. True once they are given back, or are left to the reaper. Raises `Conflict` and other
        errors of the Kubernetes API, after which it may be called again."""
        try:
            left = self._release.advance()
        except NodeGroupDenied as error:  # which no second try changes; the reaper's role may still do it
            self._report(f"{error}. The nodes are left to the reaper. If it is denied as well, by hand:")
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
    """Commands for a person who gives back the nodes of pools that this stage alone holds."""
    book = read_share_book(api)
    alone = [name for name in book.pools_of(stage) if not book.pools[name].others_of(stage)]
    return [describe_resize(name, book.pools[name].size_before) for name in alone]


def write_share(api: Api, book: ShareBook, pool: str, stage: str, nodes: int, size_before: int) -> None:
    """The stage's share of a pool. `size_before` counts where it is the pool's first.

    Raises `Conflict` when the book is no longer the one that was read.
    """
    _write(api, book, book.pools | {pool: with_share(book.pools.get(pool), stage, nodes, size_before)})


def remove_share(api: Api, book: ShareBook, pool: str, stage: str) -> None:
    """Raises `Conflict` when the book is no longer the one that was read."""
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
    """EKS's own words on why nodes do not come."""
    return "".join(f"; {issue}" for issue in group.issues)
