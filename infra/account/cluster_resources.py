"""Reads a cluster's managed node groups, and the load balancers that its controllers made for Services."""

from __future__ import annotations

from dataclasses import dataclass

from infra.account.session import STACK_TAG, Account, tags_of

# The stack and k8s/ have the same label and pool; a contract test compares them.
POOL_LABEL = "millrace.dev/pool"
CORE = "core"
# Tags of Kubernetes' own controller, then of the AWS Load Balancer Controller.
SERVICE_TAGS = ("kubernetes.io/service-name", "service.k8s.aws/stack")


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


def list_load_balancers(account: Account, cluster: str) -> dict[str, str]:
    """Each load balancer's Service as NAMESPACE/NAME, by the load balancer's name; empty if no tag has it."""
    names = {each["LoadBalancerName"] for each in account.pages("elbv2", "describe_load_balancers", "LoadBalancers")}
    classic = account.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions")
    names |= {each["LoadBalancerName"] for each in classic}
    kinds = ["elasticloadbalancing:loadbalancer"]
    services = {}
    for each in account.pages(
        "resourcegroupstaggingapi", "get_resources", "ResourceTagMappingList", ResourceTypeFilters=kinds
    ):
        tags = tags_of(each)
        if f"kubernetes.io/cluster/{cluster}" in tags or tags.get("elbv2.k8s.aws/cluster") == cluster:
            # The last part of an ARN is net/NAME/ID or app/NAME/ID, and NAME of a classic one.
            name = each["ResourceARN"].partition("loadbalancer/")[2].split("/")[:2][-1]
            if name in names:  # AWS lists the tags of a deleted one for a while
                services[name] = next((tags[key] for key in SERVICE_TAGS if key in tags), "")
    return services
