"""Places the work of a command on the nodes of its stage in a Ray cluster, and waits for room there.

One cluster may have nodes of several stages, with different images. A command on a node that declares the resource
`stage_<name>` places its work on nodes that declare the same resource.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from services.common.errors import NoRoomForWorkers, TryAgain
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX
from services.common.process.shutdown import deferring_stop_signals

GROUP_START_SECONDS = 600.0
POLL_SECONDS = 1.0
TASK_SHARE = 0.001


def live_nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of the nodes that are alive."""
    with deferring_stop_signals():
        return [node for node in ray.nodes() if node["Alive"]]


def require_own_node() -> None:
    """Raise `TryAgain` where this node is not among Ray's live ones: without its raylet Ray would wait for ever."""
    if ray.get_runtime_context().get_node_id() not in {node["NodeID"] for node in live_nodes()}:
        raise TryAgain("Ray was lost: the raylet of this node ended. Run the same command again to continue.")


def nodes_of_stage() -> list[dict[str, Any]]:
    """Return the live nodes that declare the stage of this node: all live nodes where nodes declare no stage."""
    group = share_of_group(TASK_SHARE)
    return [node for node in live_nodes() if group.keys() <= node["Resources"].keys()]


def share_of_group(share: float) -> dict[str, float]:
    """The demand that keeps work on the nodes of this node's stage; empty where nodes declare no stage."""
    here = ray.get_runtime_context().get_node_id()
    declared = [name for node in live_nodes() if node["NodeID"] == here for name in node["Resources"]]
    return {name: share for name in declared if name.startswith(STAGE_RESOURCE_PREFIX)}


def capacities_for(demand: dict[str, float]) -> list[int]:
    """Return how many times each running node could hold `demand` if nothing else ran on it."""
    nodes = [node["Resources"] for node in live_nodes()]
    return [int(min(node.get(name, 0.0) / amount for name, amount in demand.items())) for node in nodes]


def wait_for_room(demand: dict[str, float], count: int = 1) -> dict[str, float]:
    """Wait until as many running nodes of this stage could each hold `demand` if nothing else ran on them.

    Returns what a task demands besides, so that Ray places it on such a node. Raises `NoRoomForWorkers` after
    GROUP_START_SECONDS: Ray itself has no limit.
    """
    deadline = time.monotonic() + GROUP_START_SECONDS
    while True:
        group = share_of_group(TASK_SHARE)
        wanted = demand | {name: share for name, share in group.items() if name not in demand}
        if sum(map(bool, capacities_for(wanted))) >= count:
            return group
        if time.monotonic() > deadline:
            raise no_room(wanted, count)
        time.sleep(POLL_SECONDS)


def no_room(demand: dict[str, float], count: int) -> NoRoomForWorkers:
    """Make the error of a cluster without room, which lists what the live nodes have of the demanded resources."""

    def show(resources: dict[str, float]) -> str:
        return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in demand)

    nodes = "".join(f"\n  {node['NodeManagerAddress']}  {show(node['Resources'])}" for node in live_nodes())
    return NoRoomForWorkers(
        f"for {GROUP_START_SECONDS:.0f} s the Ray cluster had no free resources for {count} x "
        f"({show(demand)}), each on a node alone. Its live nodes have, free or in use:{nodes}\n"
        f"Add nodes to the stage's worker group, or stop other work on them, and run the same command again."
    )
