"""The shares of the node pools: what each stage holds of a pool, and how large the pool was before.

They are written before a pool is raised and removed after it is lowered, so that whoever comes next, another process
of the deploy Job or the reaper, knows what there is to lower. They outlive the deploy Job, whose record does not. One
Lease has them all, since two stages of a pool must not overwrite each other's share: its version says who was faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k8s.objects.api import Api, Object
from k8s.objects.eks import NODE_GROUP_LABEL, split_name
from k8s.objects.names import NAMESPACE, NODE_POOLS, NODE_POOLS_ANNOTATION
from services.common.errors import DeviceError
from services.common.input.files import parse_json


@dataclass(frozen=True)
class PoolShares:
    """Of one pool, while any stage holds nodes of it."""

    size_before: int
    """Nodes that the pool was to have before the first share. They are taken to be somebody else's."""
    nodes: dict[str, int]
    """By stage."""

    @property
    def size(self) -> int:
        """Nodes that the pool has to have."""
        return self.size_before + sum(self.nodes.values())

    def others_of(self, stage: str) -> dict[str, int]:
        return {name: nodes for name, nodes in self.nodes.items() if name != stage}


@dataclass(frozen=True)
class ShareBook:
    """All shares, as they were read."""

    pools: dict[str, PoolShares]
    """By the pool's name."""
    lease: Object | None
    """That has them; None where nobody ever held any."""

    def pools_of(self, stage: str) -> list[str]:
        """Pools of which the stage holds nodes."""
        return [name for name, shares in self.pools.items() if stage in shares.nodes]


def read_share_book(api: Api) -> ShareBook:
    """Raises `DeviceError` for a book that cannot be read: nobody's nodes are then raised or lowered."""
    lease = api.find("Lease", NODE_POOLS)
    text = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(NODE_POOLS_ANNOTATION, "{}")
    return ShareBook(_read_pools(text), lease)


def _read_pools(text: str) -> dict[str, PoolShares]:
    try:
        read = {name: PoolShares(**each) for name, each in parse_json(text.encode()).items()}
        numbers = [number for each in read.values() for number in (each.size_before, *each.nodes.values())]
        is_whole = all(isinstance(number, int) for number in numbers)
    except (ValueError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise DeviceError(
            f"Lease {NODE_POOLS}: its annotation {NODE_POOLS_ANNOTATION} is no book of shares: {text!r} (expected: "
            f'{{"CLUSTER/GROUP": {{"size_before": 0, "nodes": {{"trainer": 4}}}}}}). As long as it is so, nobody '
            f"raises or lowers a pool. Lower by hand what no stage uses (aws eks update-nodegroup-config), then: "
            f"kubectl -n {NAMESPACE} delete lease {NODE_POOLS}"
        )
    return read


def with_share(shares: PoolShares | None, stage: str, nodes: int, size_before: int) -> PoolShares:
    """A pool's shares with the stage's. `size_before` counts where there were none."""
    shares = shares or PoolShares(size_before, {})
    return replace(shares, nodes=shares.nodes | {stage: nodes})


def describe_holders(shares: PoolShares) -> str:
    """Who holds what of a pool."""
    held = [f"{stage} holds {nodes}" for stage, nodes in sorted(shares.nodes.items())]
    before = [f"{shares.size_before} were there before"] if shares.size_before else []
    return ", ".join(before + held)


def count_ready_nodes(api: Api, name: str) -> int:
    """Nodes of the pool CLUSTER/GROUP that have joined the cluster and are Ready."""
    nodes = api.find_all("Node", f"{NODE_GROUP_LABEL}={split_name(name)[1]}")
    return sum(map(_is_ready, nodes))


def _is_ready(node: Object) -> bool:
    conditions = node["status"].get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
