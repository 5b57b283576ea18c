"""Reads a cluster's managed node groups, with their owners and pools."""

from __future__ import annotations

from dataclasses import dataclass

from infra.account.session import STACK_TAG, Account

# The stack and k8s/ have the same label and pool; a contract test compares them.
POOL_LABEL = "millrace.dev/pool"
CORE = "core"


@dataclass(frozen=True)
class NodeGroup:
    """A managed node group and its desired size."""

    name: str
    pool: str
    """Pool of the stages whose pods run on the group; empty without the label."""
    stack: str
    """Name of the stack that made the group, from its tag; empty if somebody else made it."""
    desired_nodes: int
    min_nodes: int


def list_node_groups(account: Account, cluster: str) -> list[NodeGroup]:
    """Lists all node groups, except those that disappear while they are read."""
    groups = []
    for name in account.pages("eks", "list_nodegroups", "nodegroups", clusterName=cluster):
        if answer := account.find("eks", "describe_nodegroup", clusterName=cluster, nodegroupName=name):
            found = answer["nodegroup"]
            pool, stack = (found.get("labels") or {}).get(POOL_LABEL, ""), (found.get("tags") or {}).get(STACK_TAG, "")
            size = found["scalingConfig"]
            groups.append(NodeGroup(name, pool, stack, size["desiredSize"], size["minSize"]))
    return groups
