"""Load balancers of an account, and the Services of a cluster for which its controllers made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infra.account.session import Account

# Kubernetes' own controller tags with the first of each pair, the AWS Load Balancer Controller with the second.
CLUSTER_TAGS = {"kubernetes.io/cluster/{cluster}": None, "elbv2.k8s.aws/cluster": "{cluster}"}
SERVICE_TAGS = ("kubernetes.io/service-name", "service.k8s.aws/stack")
BATCH = 20
"""Load balancers whose tags AWS tells in one answer."""


@dataclass(frozen=True)
class LoadBalancer:
    """One of either API: Elastic Load Balancing's second, or its first, whose load balancers are called classic."""

    name: str
    arn: str
    """Empty for a classic one, which AWS knows by its name."""
    vpc: str
    tags: dict[str, str]

    @property
    def is_classic(self) -> bool:
        return not self.arn

    @property
    def service(self) -> str:
        """Namespace and name of its Service, a slash between them; empty where no tag tells."""
        return next((self.tags[each] for each in SERVICE_TAGS if each in self.tags), "")

    def is_of(self, cluster: str) -> bool:
        """Did a controller of this cluster make it?"""
        wanted = {key.format(cluster=cluster): value for key, value in CLUSTER_TAGS.items()}
        return any(
            key in self.tags and (value is None or self.tags[key] == value.format(cluster=cluster))
            for key, value in wanted.items()
        )


def list_load_balancers(account: Account) -> Iterator[LoadBalancer]:
    """All of the account in its region, with two questions to AWS and one more for each 20 of them."""
    newer = {
        each["LoadBalancerArn"]: each for each in account.pages("elbv2", "describe_load_balancers", "LoadBalancers")
    }
    older = {
        each["LoadBalancerName"]: each
        for each in account.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions")
    }
    for batch in _batches(list(newer)):
        for each in account.client("elbv2").describe_tags(ResourceArns=batch)["TagDescriptions"]:
            found = newer[each["ResourceArn"]]
            yield LoadBalancer(
                found["LoadBalancerName"], each["ResourceArn"], found.get("VpcId", ""), _tags(each["Tags"])
            )
    for batch in _batches(list(older)):
        for each in account.client("elb").describe_tags(LoadBalancerNames=batch)["TagDescriptions"]:
            found = older[each["LoadBalancerName"]]
            yield LoadBalancer(found["LoadBalancerName"], "", found.get("VPCId", ""), _tags(each["Tags"]))


def _tags(pairs: list[dict[str, str]]) -> dict[str, str]:
    return {pair["Key"]: pair["Value"] for pair in pairs}


def _batches(names: list[str]) -> Iterator[list[str]]:
    yield from (names[start : start + BATCH] for start in range(0, len(names), BATCH))
