"""Lists the load balancers that a cluster's controllers made for its Services."""

from __future__ import annotations

from infra.account.session import Account, tags_of

# Tags of Kubernetes' own controller, then of the AWS Load Balancer Controller.
SERVICE_TAGS = ("kubernetes.io/service-name", "service.k8s.aws/stack")


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
