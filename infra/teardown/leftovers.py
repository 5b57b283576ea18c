"""Finds the resources of one stack in the account, by tags and by names of EKS, its controllers and deployments.

Terraform's state is not read, because resources that it has forgotten cost as much.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.account.batch_queues import list_definitions, list_job_ids, list_queues
from infra.account.cluster_resources import list_load_balancers
from infra.account.session import STACK_TAG, Account, tags_of
from infra.cost.estimate import HOURS_OF_A_MONTH, control_plane_price, dollars, fsx_gb_month, read_prices
from infra.shapes import read_shapes
from services.common.errors import TryAgain
from services.common.problem_list import list_names

POLL_SECONDS = 10.0
GONE = ("terminated", "shutting-down")
CLAIM_TAGS = ("kubernetes.io/created-for/pvc/namespace", "kubernetes.io/created-for/pvc/name")


@dataclass(frozen=True)
class Leftover:
    """A resource in the account."""

    kind: str
    name: str
    detail: str
    dollars_per_month: float | None
    """List price; None if it depends on use, 0 if the resource is free."""
    is_data: bool = False
    """Whether `infra-down` keeps it unless KEEP_DATA=false."""


def find_leftovers(account: Account, stack: str) -> list[Leftover]:
    """The stack's resources, without an export's schedule and the budget; what only a tag finds comes last."""
    found = [each for find in (_compute, _network, _data, _named) for each in find(account, stack)]
    found += _tagged(account, stack, {each.name for each in found})
    return found


def describe_leftovers(leftovers: list[Leftover], stack: str, region: str) -> str:
    if not leftovers:
        return f"no resource of {stack} is left in {region}"
    kind_width, width = (max(len(getattr(each, field)) for each in leftovers) for field in ("kind", "name"))
    [of_prices] = {each.region for each in read_prices().values()}
    elsewhere = "" if region == of_prices else ", not this region's"
    lines = [f"{len(leftovers)} resources of {stack} in {region}; prices are list prices of {of_prices}{elsewhere}"]
    for each in leftovers:
        price = "by use" if each.dollars_per_month is None else f"${each.dollars_per_month:,.2f}/month"
        kept = "  data" if each.is_data else ""
        lines.append(f"  {each.kind:{kind_width}}  {each.name:{width}}  {price:>14}  {each.detail}{kept}")
    lines.append(f"total ${sum(each.dollars_per_month or 0 for each in leftovers):,.2f}/month, plus prices by use")
    return "\n".join(lines)


def list_unused_interfaces(account: Account, stack: str) -> list[str]:
    """Unused network interfaces of nodes or a cluster's CNI, which keep subnets and security groups from deletion."""
    found: dict[str, None] = {}
    for tag in (STACK_TAG, "cluster.k8s.amazonaws.com/name"):
        filters = [{"Name": f"tag:{tag}", "Values": [stack]}, {"Name": "status", "Values": ["available"]}]
        pages = account.pages("ec2", "describe_network_interfaces", "NetworkInterfaces", Filters=filters)
        found |= dict.fromkeys(each["NetworkInterfaceId"] for each in pages)
    return list(found)


def list_claim_volumes(account: Account, cluster: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Volumes that the EBS driver made, each with its claim as NAMESPACE/NAME, which is empty without tags."""
    filters = [{"Name": "tag-key", "Values": [f"kubernetes.io/cluster/{cluster}"]}]
    for each in account.pages("ec2", "describe_volumes", "Volumes", Filters=filters):
        tags = tags_of(each)
        yield each, "/".join(tags[key] for key in CLAIM_TAGS if key in tags)


def list_pool_instances(account: Account, cluster: str, node_group: str) -> list[str]:
    """Instances of a managed node group that are not terminated yet."""
    filters = [
        {"Name": "tag:eks:cluster-name", "Values": [cluster]},
        {"Name": "tag:eks:nodegroup-name", "Values": [node_group]},
    ]
    return [each["InstanceId"] for each in list_instances(account, filters)]


def list_instances(account: Account, filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Instances as EC2 describes them, without terminated ones."""
    for reservation in account.pages("ec2", "describe_instances", "Reservations", Filters=filters):
        yield from (each for each in reservation["Instances"] if each["State"]["Name"] not in GONE)


def _compute(account: Account, stack: str) -> Iterator[Leftover]:
    if answer := account.find("eks", "describe_cluster", name=stack):
        found = answer["cluster"]
        version, policy = found.get("version") or "", (found.get("upgradePolicy") or {}).get("supportType", "")
        hourly = dollars(control_plane_price(version, policy, datetime.now(UTC).date()))
        yield Leftover("EKS cluster", stack, f"control plane, Kubernetes {version}", hourly * HOURS_OF_A_MONTH)
    for queue in list_queues(account, stack):
        jobs = len(list(list_job_ids(account, queue)))
        yield Leftover("job queue", queue, f"jobs that have not ended: {jobs}", 0)
    names = [arn.rpartition("/")[2].rpartition(":")[0] for arn in list_definitions(account, stack)]
    for name in sorted(set(names)):
        yield Leftover("job definition", name, f"revisions: {names.count(name)}", 0, is_data=True)
    # EKS tags its nodes even if the user's own launch template does not.
    living = {
        each["InstanceId"]: each
        for tag in (STACK_TAG, "eks:cluster-name")
        for each in list_instances(account, [{"Name": f"tag:{tag}", "Values": [stack]}])
    }
    for name, each in living.items():
        shape = read_shapes().get(each["InstanceType"])
        price = shape.price.dollars_per_hour * HOURS_OF_A_MONTH if shape and shape.price else None
        yield Leftover("instance", name, f"{each['InstanceType']}, {each['State']['Name']}", price)
    for each, _ in list_claim_volumes(account, stack):
        detail = f"{each['Size']} GiB, {each['State']}, made for a claim"
        yield Leftover("volume", each["VolumeId"], detail, each["Size"] * dollars("volume_gb_month"))


def _network(account: Account, stack: str) -> Iterator[Leftover]:
    for name in list_unused_interfaces(account, stack):
        yield Leftover("interface", name, "unused; keeps its subnet from deletion", 0)
    for name in list_load_balancers(account, stack):
        yield Leftover("load balancer", name, "of a Service", dollars("load_balancer_hour") * HOURS_OF_A_MONTH)
    filters = [{"Name": f"tag:{STACK_TAG}", "Values": [stack]}]
    hourly = dollars("nat_gateway_hour") + dollars("public_address_hour")
    for gateway in account.pages("ec2", "describe_nat_gateways", "NatGateways", Filters=filters):
        if gateway["State"] not in ("deleted", "deleting"):
            yield Leftover("NAT gateway", gateway["NatGatewayId"], gateway["State"], hourly * HOURS_OF_A_MONTH)


def _data(account: Account, stack: str) -> Iterator[Leftover]:
    for each in account.pages("fsx", "describe_file_systems", "FileSystems"):
        if tags_of(each).get(STACK_TAG) == stack:
            throughput = (each.get("LustreConfiguration") or {}).get("PerUnitStorageThroughput") or 0
            price = read_prices().get(fsx_gb_month(throughput))
            monthly = each["StorageCapacity"] * price.dollars if price else None
            yield Leftover("FSx", each["FileSystemId"], f"{each['StorageCapacity']} GiB", monthly, is_data=True)
    for each in account.pages("ecr", "describe_repositories", "repositories"):
        tags = account.client("ecr").list_tags_for_resource(resourceArn=each["repositoryArn"])["tags"]
        if {"Key": STACK_TAG, "Value": stack} in tags:
            yield Leftover("ECR", each["repositoryName"], "images", None, is_data=True)


def _named(account: Account, stack: str) -> Iterator[Leftover]:
    """Resources by name: AWS makes some log groups, and others have no tags or the tagging API does not list them."""
    for prefix in (f"/aws/eks/{stack}/", f"/aws/containerinsights/{stack}/", f"/aws/fsx/{stack}", f"/{stack}/"):
        for each in account.pages("logs", "describe_log_groups", "logGroups", logGroupNamePrefix=prefix):
            gigabytes = each.get("storedBytes", 0) / 1e9
            price = gigabytes * dollars("log_gb_month")
            yield Leftover("log group", each["logGroupName"], f"{gigabytes:.1f} GB", price)
    start = f"{stack}-{account.region}"
    roles = [each["RoleName"] for each in account.pages("iam", "list_roles", "Roles")]
    policies = [each["PolicyName"] for each in account.pages("iam", "list_policies", "Policies", Scope="Local")]
    for kind, names in (("IAM role", roles), ("IAM policy", policies)):
        yield from (Leftover(kind, name, "", 0) for name in names if name.startswith(f"{start}-"))


def _tagged(account: Account, stack: str, known: set[str]) -> Iterator[Leftover]:
    """Other resources with the stack's tag: a bucket, a VPC and its parts, keys, alarms."""
    filters = [{"Key": STACK_TAG, "Values": [stack]}]
    found = account.pages("resourcegroupstaggingapi", "get_resources", "ResourceTagMappingList", TagFilters=filters)
    for arn in (each["ResourceARN"] for each in found):
        _, _, service, _, _, resource = arn.split(":", 5)
        # A deleted NAT gateway keeps its tags for an hour; `_network` lists the others.
        name = re.split("[/:]", resource.removesuffix(":*"), maxsplit=1)[-1]
        if name in known or resource.startswith("natgateway/"):
            continue
        if service == "s3":
            yield Leftover("bucket", resource, "objects", None, is_data=True)
        elif not resource.startswith("key/"):
            yield Leftover(service, resource, "", 0)
        elif account.client("kms").describe_key(KeyId=arn)["KeyMetadata"]["KeyState"] == "PendingDeletion":
            yield Leftover(service, resource, "AWS deletes it within 30 days", 0)
        else:
            yield Leftover(service, resource, "", dollars("key_month"))


def wait_until_none(what: str, find: Callable[[], list[str]], timeout_seconds: float, advice: str) -> None:
    """Waits until `find` returns nothing, and prints what is left whenever that changes.

    Raises `TryAgain` with the advice if some are left after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    said = ""
    while left := find():
        state = f"waiting     until these {what} are gone: {list_names(left)}"
        if state != said:
            print(state, flush=True)
            said = state
        if time.monotonic() > deadline:
            raise TryAgain(
                f"{what} are not gone after {timeout_seconds:.0f} s: {', '.join(left)}. {advice}. Run the same command "
                f"again to continue"
            )
        time.sleep(POLL_SECONDS)
