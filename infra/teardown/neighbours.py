"""Finds resources of others on a stack's cluster and in its network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from infra.account.cluster_resources import list_load_balancers, list_node_groups
from infra.account.session import STACK_TAG, Account, tags_of
from infra.addons.releases import list_installed, read_releases
from infra.teardown.leftovers import list_instances
from infra.workloads.kubernetes_cluster import list_cloud_objects, list_objects

NAMESPACES = ("millrace", "millrace-setup")  # k8s/ makes them; a contract test compares them
# Namespaces of Kubernetes and of EKS' add-ons.
OF_AWS = ("kube-system", "kube-public", "kube-node-lease", "amazon-cloudwatch", "amazon-guardduty")
DEFAULT = "default"  # always exists; somebody uses it if it has pods
# EKS sets this tag on its security group and on nodes of managed node groups; the cluster's controllers set it as well.
CLUSTER_TAG = "kubernetes.io/cluster/{name}"
NODE_GROUP_TAG = "eks:nodegroup-name"
# By kind, what its operations are called, the keys of an id and of a description, and the command that removes it.
NETWORK_PARTS = {
    "VPC endpoint": ("vpc_endpoint", "VpcEndpointId", "ServiceName", "delete-vpc-endpoints --vpc-endpoint-ids"),
    "subnet": ("subnet", "SubnetId", "CidrBlock", "delete-subnet --subnet-id"),
    "security group": ("security_group", "GroupId", "GroupName", "delete-security-group --group-id"),
}
# By version of the API, the keys of an answer, of the VPC and of an id, and the option of the command that removes it.
LOAD_BALANCERS = {
    "elbv2": ("LoadBalancers", "VpcId", "LoadBalancerArn", "load-balancer-arn"),
    "elb": ("LoadBalancerDescriptions", "VPCId", "LoadBalancerName", "load-balancer-name"),
}


@dataclass(frozen=True)
class Neighbour:
    """A resource that neither terraform nor `make addons` made."""

    kind: str
    name: str
    detail: str
    removal: str
    """The command with which its owner removes it."""
    is_on_cluster: bool = False
    """Whether it is destroyed with the cluster, or keeps EKS from deleting it; else it keeps EC2 from deleting the VPC,
    a subnet or a security group."""


def find_in_account(account: Account, stack: str) -> Iterator[Neighbour]:
    """Resources of others on the stack's cluster and in the VPCs that it made, as AWS' API lists them."""
    if account.find("eks", "describe_cluster", name=stack):
        yield from _node_pools(account, stack)
    filters = [{"Name": f"tag:{STACK_TAG}", "Values": [stack]}]
    for vpc in account.pages("ec2", "describe_vpcs", "Vpcs", Filters=filters):
        yield from _instances(account, stack, vpc["VpcId"])
        yield from _network_parts(account, stack, vpc["VpcId"])
        yield from _load_balancers(account, stack, vpc["VpcId"])


def describe_neighbours(neighbours: list[Neighbour]) -> str:
    """Two lines per resource: what it is, and the command that removes it."""
    kind_width, width = (max(len(getattr(each, field)) for each in neighbours) for field in ("kind", "name"))
    return "\n".join(
        f"  {each.kind:{kind_width}}  {each.name:{width}}  {each.detail}\n  {'':{kind_width}}  {each.removal}"
        for each in neighbours
    )


def _node_pools(account: Account, stack: str) -> Iterator[Neighbour]:
    for group in list_node_groups(account, stack):
        if group.stack != stack:
            removal = f"aws eks delete-nodegroup --cluster-name {stack} --nodegroup-name {group.name}"
            yield Neighbour("node group", group.name, f"{group.desired_nodes} nodes", removal, is_on_cluster=True)
    for name in account.pages("eks", "list_fargate_profiles", "fargateProfileNames", clusterName=stack):
        removal = f"aws eks delete-fargate-profile --cluster-name {stack} --fargate-profile-name {name}"
        yield Neighbour("Fargate profile", name, "", removal, is_on_cluster=True)


def _instances(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    """Instances of others. A node outside managed node groups, such as one of Karpenter's, is on the cluster."""
    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    for each in list_instances(account, filters):
        tags = tags_of(each)
        if tags.get(STACK_TAG) == stack or NODE_GROUP_TAG in tags:
            continue
        is_node = CLUSTER_TAG.format(name=stack) in tags
        removal = f"aws ec2 terminate-instances --instance-ids {each['InstanceId']}"
        yield Neighbour("instance", each["InstanceId"], each["InstanceType"], removal, is_node)


def _network_parts(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    """Parts of others, without the VPC's default security group and those of EKS and the cluster's controllers."""
    filters, of_cluster = [{"Name": "vpc-id", "Values": [vpc]}], CLUSTER_TAG.format(name=stack)
    for kind, (noun, id_key, name_key, removal) in NETWORK_PARTS.items():
        answer = f"{noun.title().replace('_', '')}s"
        for each in account.pages("ec2", f"describe_{noun}s", answer, Filters=filters):
            tags = tags_of(each)
            if tags.get(STACK_TAG) != stack and of_cluster not in tags and each.get("GroupName") != "default":
                yield Neighbour(kind, each[id_key], each[name_key], f"aws ec2 {removal} {each[id_key]}")


def _load_balancers(account: Account, stack: str, vpc: str) -> Iterator[Neighbour]:
    """Load balancers that no controller of the cluster made."""
    own = list_load_balancers(account, stack)
    for api, (answer, vpc_key, id_key, option) in LOAD_BALANCERS.items():
        for each in account.pages(api, "describe_load_balancers", answer):
            if each.get(vpc_key) == vpc and each["LoadBalancerName"] not in own:
                removal = f"aws {api} delete-load-balancer --{option} {each[id_key]}"
                yield Neighbour("load balancer", each["LoadBalancerName"], each.get("Type", "classic"), removal)


def find_on_cluster() -> Iterator[Neighbour]:
    """Resources of others on the cluster, in one request per kind of object."""
    installed = list_installed()
    pods = Counter(each["metadata"]["namespace"] for each in list_objects("pods"))
    # An add-on's namespace outlives its release.
    known = {*NAMESPACES, *OF_AWS, DEFAULT, *(release.namespace for release in read_releases())}
    names = sorted(each["metadata"]["name"] for each in list_objects("namespaces"))
    foreign = [name for name in names if name not in known or (name == DEFAULT and pods[name])]
    for name in foreign:
        releases = [each.name for each in installed if each.namespace == name]
        detail = f"{pods[name]} pods" + (f", helm releases {', '.join(releases)}" if releases else "")
        command = "--namespace default delete all --all" if name == DEFAULT else f"delete namespace {name}"
        yield Neighbour("namespace", name, detail, f"kubectl {command}", is_on_cluster=True)
    for release in installed:
        if not release.is_ours and release.namespace not in foreign:
            removal = f"helm --namespace {release.namespace} uninstall {release.name}"
            detail = f"{release.chart} in {release.namespace}"
            yield Neighbour("helm release", release.name, detail, removal, is_on_cluster=True)
    own = {(each.namespace, each.name) for each in installed if each.is_ours}
    for each in list_cloud_objects():  # whose load balancers and volumes would outlive the cluster in the account
        if each.namespace not in NAMESPACES and each.release not in own:
            detail = f"with a {'load balancer' if each.kind == 'service' else 'volume'} in the account"
            removal = f"kubectl --namespace {each.namespace} delete {each.kind} {each.name}"
            yield Neighbour(each.kind, f"{each.namespace}/{each.name}", detail, removal, is_on_cluster=True)
