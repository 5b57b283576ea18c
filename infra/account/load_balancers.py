"""Lists an account's load balancers, and the Kubernetes Services for which controllers made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infra.account.session import Account

# Kubernetes' own controller tags with the first of each pair, the AWS Load Balancer Controller with the second.
CLUSTER_TAGS = {"kubernetes.io/cluster/{cluster}": None, "elbv2.k8s.aws/cluster": "{cluster}"}
SERVICE_TAGS = ("kubernetes.io/service-name", "service.k8s.aws/stack")
BATCH = 20
"""Number of load balancers whose tags AWS returns in one answer."""


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
    """Lists all load balancers in the account's region, in two requests and another one per 20 load balancers."""
    newer = {
        each["LoadBalancerArn"]: each for each in account.pages("elbv2", "describe_load_balancers", "LoadBalancers")
    }
    for each, tags in _read_tags(account, "elbv2", "ResourceArns", "ResourceArn", newer):
        yield LoadBalancer(each["LoadBalancerName"], each["LoadBalancerArn"], each.get("VpcId", ""), tags)
    older = {
        each["LoadBalancerName"]: each
        for each in account.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions")
    }
    for each, tags in _read_tags(account, "elb", "LoadBalancerNames", "LoadBalancerName", older):
        yield LoadBalancer(each["LoadBalancerName"], "", each.get("VPCId", ""), tags)


def _read_tags(
    account: Account, service: str, argument: str, key: str, found: dict[str, dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    names = list(found)
    for start in range(0, len(names), BATCH):
        answer = account.client(service).describe_tags(**{argument: names[start : start + BATCH]})
        for each in answer["TagDescriptions"]:
            yield found[each[key]], {pair["Key"]: pair["Value"] for pair in each["Tags"]}
