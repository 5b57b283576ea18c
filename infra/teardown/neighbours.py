"""Finds resources of others on a stack's cluster and in its network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from infra.account.load_balancers import list_load_balancers
from infra.account.managed_node_groups import list_node_groups
from infra.account.session import STACK_TAG, Account, explaining_refusals
from infra.teardown.leftovers import GONE, has_stack_tag

# EKS sets this tag on its security group and on nodes of managed node groups; the cluster's controllers set it as well.
CLUSTER_TAG = "kubernetes.io/cluster/{name}"
NODE_GROUP_TAG = "eks:nodegroup-name"


class Place(Enum):
    """Location of a resource, which decides how a teardown affects it."""

    CLUSTER = "on the cluster"
    """The resource is destroyed with the cluster, or keeps EKS from deleting the cluster."""
    NETWORK = "in the network"
    """The resource keeps EC2 from deleting the VPC, a subnet or a security group."""


@dataclass(frozen=True)
class Neighbour:
    """A resource that neither terraform nor `make addons` made."""

    kind: str
    name: str
    detail: str
    place: Place
    removal: str
    """The command with which its owner removes it."""


def find_in_account(account: Account, stack: str, has_service: Callable[[str], bool]) -> list[Neighbour]:
    """Resources of others on the stack's cluster and in its VPCs, as AWS' API lists them.

    Leaves out load balancers of Services that the cluster has: `has_service` gets the Service as NAMESPACE/NAME.
    """
    found: list[Neighbour] = []
    with explaining_refusals("infra-down, things of others"):
        if account.find("eks", "describe_cluster", name=stack):
            found += _node_groups(account, stack)
            found += _fargate_profiles(account, stack)
        filters = [{"Name": f"tag:{STACK_TAG}", "Values": [stack]}]
        for vpc in account.pages("ec2", "describe_vpcs", "Vpcs", Filters=filters):
            for find in (_instances, _endpoints, _subnets, _security_groups):
                found += find(account, stack, vpc["VpcId"])
            found += _load_balancers(account, vpc["VpcId"], has_service)
    return found


def describe_neighbours(neighbours: list[Neighbour]) -> str:
    """Two lines per resource: what it is, and the command that removes it."""
    kind_width, width = (max(len(getattr(each, field)) for each in neighbours) for field in ("kind", "name"))
    return "\n".join(
        f"  {each.kind:{kind_width}}  {each.name:{width}}  {each.detail}\n  {'':{kind_width}}  {each.removal}"
        for each in neighbours
    )


def _node_groups(account: Account, stack: str) -> Iterator[Neighbour]:
    for group in list_node_groups(account, stack):
        if group.stack != stack:
            removal = f"aws eks delete-nodegroup --cluster-name {stack} --nodegroup-name {group.name}"
            yield Neighbour("node group", group.name, f"{group.desired_nodes} nodes", Place.CLUSTER, removal)


def _fargate_profiles(account: Account, stack: str) -> Iterator[Neighbour]:
    for name in account.pages("eks", "list_fargate_profiles", "fargateProfileNames", clusterName=stack):
        removal = f"aws eks delete-fargate-profile --cluster-name {stack} --fargate-profile-name {name}"
        yield Neighbour("Fargate profile", name, "", Place.CLUSTER, removal)


def _instances(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    """Instances of others. A node outside managed node groups, such as one of Karpenter's, is on the cluster."""
    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    for reservation in account.pages("ec2", "describe_instances", "Reservations", Filters=filters):
        for each in reservation["Instances"]:
            tags = each.get("Tags") or []
            keys = {pair["Key"] for pair in tags}
            if each["State"]["Name"] in GONE or has_stack_tag(tags, stack) or NODE_GROUP_TAG in keys:
                continue
            place = Place.CLUSTER if CLUSTER_TAG.format(name=stack) in keys else Place.NETWORK
            removal = f"aws ec2 terminate-instances --instance-ids {each['InstanceId']}"
            yield Neighbour("instance", each["InstanceId"], each["InstanceType"], place, removal)


def _endpoints(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    for each in _foreign(account, "describe_vpc_endpoints", "VpcEndpoints", stack, vpc):
        removal = f"aws ec2 delete-vpc-endpoints --vpc-endpoint-ids {each['VpcEndpointId']}"
        yield Neighbour("VPC endpoint", each["VpcEndpointId"], each["ServiceName"], Place.NETWORK, removal)


def _subnets(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    for each in _foreign(account, "describe_subnets", "Subnets", stack, vpc):
        removal = f"aws ec2 delete-subnet --subnet-id {each['SubnetId']}"
        yield Neighbour("subnet", each["SubnetId"], each["CidrBlock"], Place.NETWORK, removal)


def _security_groups(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    """Security groups of others, without the VPC's default group and those of EKS and the cluster's controllers."""
    of_cluster = CLUSTER_TAG.format(name=stack)
    for each in _foreign(account, "describe_security_groups", "SecurityGroups", stack, vpc):
        if each["GroupName"] == "default" or of_cluster in {pair["Key"] for pair in each.get("Tags") or []}:
            continue
        removal = f"aws ec2 delete-security-group --group-id {each['GroupId']}"
        yield Neighbour("security group", each["GroupId"], each["GroupName"], Place.NETWORK, removal)


def _foreign(account: Account, operation: str, key: str, stack: str, vpc: str) -> Iterator[dict[str, Any]]:
    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    for each in account.pages("ec2", operation, key, Filters=filters):
        if not has_stack_tag(each.get("Tags"), stack):
            yield each


def _load_balancers(account: Account, vpc: str, has_service: Callable[[str], bool]) -> Iterator[Neighbour]:
    for each in list_load_balancers(account):
        if each.vpc != vpc or has_service(each.service):
            continue
        detail = f"of Service {each.service}, which the cluster does not have" if each.service else ""
        removal = (
            f"aws elb delete-load-balancer --load-balancer-name {each.name}"
            if each.is_classic
            else f"aws elbv2 delete-load-balancer --load-balancer-arn {each.arn}"
        )
        yield Neighbour("load balancer", each.name, detail, Place.NETWORK, removal)
