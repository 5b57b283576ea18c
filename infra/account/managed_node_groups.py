"""The managed node groups of a cluster: whose they are, and the pool of each."""

from __future__ import annotations

from dataclasses import dataclass

from botocore.exceptions import ClientError

from infra.account.session import STACK_TAG, Account, is_absent

# As the stack and k8s/ spell them; the contract test holds all three together.
POOL_LABEL = "millrace.dev/pool"
CORE, TRAINIUM = "core", "trainium"


@dataclass(frozen=True)
class NodeGroup:
    """One of them, with its size as it is asked for."""

    name: str
    pool: str
    """Which stages' pods come here; empty where no label says it."""
    stack: str
    """Name of the stack whose terraform made the group, by its tag; empty where somebody else made it."""
    subnet_ids: tuple[str, ...]
    desired_nodes: int
    min_nodes: int
    ami_release: str
    """Of its machine image, such as 1.34.7-20260505; empty where EKS does not tell it."""


def list_node_groups(account: Account, cluster: str) -> list[NodeGroup]:
    """All but those that somebody else deletes at this moment."""
    names = account.pages("eks", "list_nodegroups", "nodegroups", clusterName=cluster)
    return [found for name in names if (found := _find(account, cluster, name))]


def _find(account: Account, cluster: str, name: str) -> NodeGroup | None:
    try:
        found = account.client("eks").describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
    except ClientError as error:
        if is_absent(error):
            return None
        raise
    size = found["scalingConfig"]
    return NodeGroup(
        name=name,
        pool=(found.get("labels") or {}).get(POOL_LABEL, ""),
        stack=(found.get("tags") or {}).get(STACK_TAG, ""),
        subnet_ids=tuple(found["subnets"]),
        desired_nodes=size["desiredSize"],
        min_nodes=size["minSize"],
        ami_release=found.get("releaseVersion") or "",
    )
