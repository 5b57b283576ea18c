"""The shares of the node pools: how many nodes of a pool each stage holds, and how large the pool was before.

A share is written before the pool is raised and removed after the pool is lowered, so that the next process, of the
deploy Job or the reaper, knows what to lower. Shares outlive the deploy Job and its record. One Lease holds them all:
two stages of a pool cannot overwrite each other's share, because the API server refuses a write of an old version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from k8s.objects.api import Api, Object
from k8s.objects.conditions import has_condition
from k8s.objects.eks import NODE_GROUP_LABEL, split_name
from k8s.objects.names import NAMESPACE, NODE_POOLS, NODE_POOLS_ANNOTATION
from services.common.errors import DeviceError


@dataclass(frozen=True)
class PoolShares:
    """The shares of one pool, while any stage holds nodes of it."""

    size_before: int
    """Desired nodes of the pool before the first share; they belong to somebody else."""
    nodes: dict[str, int]
    """Nodes that each holder, a stage or a one-off, holds."""

    @property
    def size(self) -> int:
        """Number of nodes that the pool must have."""
        return self.size_before + sum(self.nodes.values())

    def others_of(self, stage: str) -> dict[str, int]:
        return {name: nodes for name, nodes in self.nodes.items() if name != stage}


@dataclass(frozen=True)
class ShareBook:
    """The shares of all pools as they were read."""

    pools: dict[str, PoolShares]
    """Shares by the name of the pool."""
    lease: Object | None
    """The Lease that holds the shares; None where nobody ever held a node."""

    def pools_of(self, stage: str) -> list[str]:
        """Names of the pools of which the stage holds nodes."""
        return [name for name, shares in self.pools.items() if stage in shares.nodes]


def read_share_book(api: Api) -> ShareBook:
    """Read all shares. Raises `DeviceError` for damaged shares, with which no pool may be raised or lowered."""
    lease = api.find("Lease", NODE_POOLS)
    text = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(NODE_POOLS_ANNOTATION, "{}")
    return ShareBook(_read_pools(text), lease)


def _read_pools(text: str) -> dict[str, PoolShares]:
    try:
        read = {name: PoolShares(**each) for name, each in json.loads(text).items()}
        numbers = [number for each in read.values() for number in (each.size_before, *each.nodes.values())]
        is_whole = all(isinstance(number, int) for number in numbers)
    except (ValueError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise DeviceError(
            f"Lease {NODE_POOLS}: its annotation {NODE_POOLS_ANNOTATION} is damaged: {text!r} (expected: "
            f'{{"CLUSTER/GROUP": {{"size_before": 0, "nodes": {{"trainer": 4}}}}}}). No pool is raised or lowered '
            f"until it is repaired. Lower by hand the pools that no stage uses (aws eks update-nodegroup-config), "
            f"then: kubectl -n {NAMESPACE} delete lease {NODE_POOLS}"
        )
    return read


def with_share(shares: PoolShares | None, stage: str, nodes: int, size_before: int) -> PoolShares:
    """The pool's shares with one for the stage. `size_before` is used for a pool without shares."""
    shares = shares or PoolShares(size_before, {})
    return replace(shares, nodes=shares.nodes | {stage: nodes})


def describe_holders(shares: PoolShares) -> str:
    """List who holds how many nodes of a pool."""
    held = [f"{stage} holds {nodes}" for stage, nodes in sorted(shares.nodes.items())]
    before = [f"{shares.size_before} were there before"] if shares.size_before else []
    return ", ".join(before + held)


def count_ready_nodes(api: Api, name: str) -> int:
    """Number of nodes of the pool CLUSTER/GROUP that have joined the Kubernetes cluster and are Ready."""
    nodes = api.find_all("Node", f"{NODE_GROUP_LABEL}={split_name(name)[1]}")
    return sum(has_condition(node, "Ready") for node in nodes)
