"""Lists an account's load balancers, and the Kubernetes Services for which controllers made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infra.account.session import Account, tags_of

# Kubernetes' own controller tags with the first of each pair, the AWS Load Balancer Controller with the second.
CLUSTER_TAGS = {"kubernetes.io/cluster/{cluster}": None, "elbv2.k8s.aws/cluster": "{cluster}"}
SERVICE_TAGS = ("kubernetes.io/service-name", "service.k8s.aws/stack")


@dataclass(frozen=True)
class LoadBalancer:
    """A load balancer of either version of Elastic Load Balancing's API; those of the first are called classic."""

    name: str
    arn: str
    """Empty for a classic load balancer, which AWS identifies by name."""
    vpc: str
    tags: dict[str, str]

    @property
    def is_classic(self) -> bool:
        return not self.arn

    @property
    def service(self) -> str:
        """The Service as NAMESPACE/NAME; empty if no tag names it."""
        return next((self.tags[each] for each in SERVICE_TAGS if each in self.tags), "")

    def is_of(self, cluster: str) -> bool:
        """Whether a controller of this cluster made the load balancer."""
        wanted = {key.format(cluster=cluster): value for key, value in CLUSTER_TAGS.items()}
        return any(
            key in self.tags and (value is None or self.tags[key] == value.format(cluster=cluster))
            for key, value in wanted.items()
        )


def list_load_balancers(account: Account) -> Iterator[LoadBalancer]:
    """Lists all load balancers in the account's region."""
    tagged = account.pages(
        "resourcegroupstaggingapi",
        "get_resources",
        "ResourceTagMappingList",
        ResourceTypeFilters=["elasticloadbalancing:loadbalancer"],
    )
    # The last part of an ARN is net/NAME/ID or app/NAME/ID, and NAME of a classic one.
    tags = {each["ResourceARN"].partition("loadbalancer/")[2]: tags_of(each) for each in tagged}
    for each in account.pages("elbv2", "describe_load_balancers", "LoadBalancers"):
        name, arn = each["LoadBalancerName"], each["LoadBalancerArn"]
        yield LoadBalancer(name, arn, each.get("VpcId", ""), tags.get(arn.partition("loadbalancer/")[2], {}))
    for each in account.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions"):
        name = each["LoadBalancerName"]
        yield LoadBalancer(name, "", each.get("VPCId", ""), tags.get(name, {}))
