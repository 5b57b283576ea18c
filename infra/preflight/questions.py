"""Checks in the account what would make `infra-up` or a first deployment fail later, at a higher price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from images.platforms import find_variant
from infra.account.batch_queues import environments_of, find_queue, list_queues
from infra.account.managed_node_groups import TRAINIUM, list_node_groups
from infra.account.session import Account, explaining_refusals
from infra.apply.inputs import Inputs
from infra.preflight.capacity_reservation import judge_reservation
from infra.preflight.default_security_group import look_at_default_group
from infra.preflight.instance_device import judge_device
from infra.preflight.kubernetes_versions import look_at_addons, look_at_kubernetes
from infra.preflight.machine_images import look_at_machine_images
from infra.preflight.requirement import Finding, Look
from infra.shapes import Shape, find_shape, read_shapes
from infra.teardown.leftovers import has_stack_tag
from infra.workloads.kubernetes_cluster import find_endpoint

RUNNING = ("pending", "running")


@dataclass(frozen=True)
class Quota:
    """A quota of on-demand vCPUs in a region. It is found by name, because only the account has its code."""

    name: str
    families: frozenset[str]
    """Letters before the generation in a type's name, such as m or trn."""


QUOTAS = (
    Quota("Running On-Demand Trn instances", frozenset({"trn"})),
    Quota(
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
        frozenset({"a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"}),
    ),
)


@dataclass(frozen=True)
class Question:
    """A check, of one place or several."""

    title: str
    look: Callable[[], list[Look]]


def run_preflight(
    account: Account,
    inputs: Inputs,
    nodes: int,
    images: dict[str, str],
    find_addresses_per_node: Callable[[], int | None],
) -> list[Finding]:
    """Prints one or more lines per check, and returns the requirements that are not met.

    `images` maps repositories to the tags that a deployment would use. `find_addresses_per_node`, which is called only
    if the Trainium subnet exists, returns how many addresses a node takes, or None if that is unknown. Raises
    `DeviceError` without credentials.
    """
    shape = find_shape(inputs.trainium_shape)
    with explaining_refusals("preflight"):
        caller = account.client("sts").get_caller_identity()
    print(f"account     {caller['Account']} as {caller['Arn']}, {account.region}", flush=True)
    with explaining_refusals("preflight, instances"):
        running = _list_running(account)
        is_up = _is_up(account, inputs)
    own = [each for each in running if _is_of(each, inputs.name)]
    others = [each for each in running if not _is_of(each, inputs.name)]
    # Nodes of the pool that are up have their quota and addresses already.
    up = sum(each["InstanceType"] == shape.name for each in own)
    findings: list[Finding] = []
    for question in (
        Question("device", lambda: [_look_at_device(inputs)]),
        Question("kubernetes", lambda: look_at_kubernetes(account, inputs)),
        Question("AMI", lambda: look_at_machine_images(account, inputs, is_up)),
        Question("add-ons", lambda: look_at_addons(account, inputs)),
        Question("groups", lambda: look_at_default_group(account, inputs)),
        Question("zone", lambda: _look_at_zones(account, inputs)),
        Question("quota", lambda: _look_at_quotas(account, inputs, nodes, others)),
        Question("addresses", lambda: [_look_at_addresses(account, inputs, nodes, up, find_addresses_per_node, is_up)]),
        Question("capacity", lambda: [_look_at_capacity(account, inputs, shape, nodes, up)]),
        Question("queues", lambda: _look_at_queues(account, inputs)),
        Question("images", lambda: [_look_at_images(account, inputs, images, is_up)]),
    ):
        with explaining_refusals(f"preflight, {question.title}"):
            looks = question.look()
        for number, (seen, found) in enumerate(looks):
            title = "" if number else question.title
            print(f"{title:11} {'' if not found else 'NOT MET: '}{seen}", flush=True)
            findings += found
    return findings


def _is_up(account: Account, inputs: Inputs) -> bool:
    """Whether the stack has a cluster or queues that accept deployments."""
    if inputs.has_cluster:
        return find_endpoint(account, inputs.name) is not None
    return bool(list_queues(account, inputs.name))


def _look_at_device(inputs: Inputs) -> Look:
    found = judge_device(inputs)
    return f"{'no image computes' if found else 'images compute'} on {inputs.trainium_shape}", found


def _look_at_zones(account: Account, inputs: Inputs) -> list[Look]:
    """Checks that the zone, in which all nodes are, offers each of their types."""
    names = dict.fromkeys((inputs.trainium_shape, inputs.cpu_shape, inputs.core_shape))
    return [_look_at_zone(account, inputs.zone_id, find_shape(name)) for name in names if name]


def _look_at_zone(account: Account, zone_id: str, shape: Shape) -> Look:
    offered = sorted(
        each["Location"]
        for each in account.pages(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone-id",
            Filters=[{"Name": "instance-type", "Values": [shape.name]}],
        )
    )
    seen = f"{shape.name} is offered in {', '.join(offered) or 'no zone'}; chosen is {zone_id}"
    if zone_id in offered:
        return seen, []
    elsewhere = [region for region in shape.zone_ids if region != account.region]
    return seen, [
        Finding(
            what=f"{zone_id} does not offer {shape.name}",
            where=f"region {account.region}, variable zone_id",
            got=zone_id,
            expected=f"one of {', '.join(offered)}" if offered else f"another region: {', '.join(elsewhere)}",
            command="write another zone_id (and region) into terraform.tfvars; ids, because names differ by account",
        )
    ]


def _look_at_quotas(account: Account, inputs: Inputs, nodes: int, others: list[dict[str, Any]]) -> list[Look]:
    """Checks the vCPU quotas. `others` are running instances outside this stack; its own are in the request anyway."""
    looks: list[Look] = []
    asked = [(find_shape(inputs.cpu_shape), inputs.cpu_max_nodes)]
    if inputs.core_nodes:
        asked.insert(0, (find_shape(inputs.core_shape), inputs.core_nodes))
    if inputs.capacity_kind == "on_demand":
        asked.append((find_shape(inputs.trainium_shape), nodes))
    else:
        looks.append((f"{inputs.trainium_shape}: the {inputs.capacity_kind} needs no on-demand quota", []))
    known = account.pages("service-quotas", "list_service_quotas", "Quotas", ServiceCode="ec2")
    limits = {each["QuotaName"]: each["Value"] for each in known}
    for quota in QUOTAS:
        counted = [(shape, count) for shape, count in asked if _family(shape.name) in quota.families and count]
        if counted:
            used = sum(_vcpus_of(each) for each in others if _family(each["InstanceType"]) in quota.families)
            looks.append(_look_at_quota(quota, limits.get(quota.name, 0.0), used, counted, account.region))
    families = {family for quota in QUOTAS for family in quota.families}
    looks += [
        (f"{shape.name}: its quota cannot be checked here; see Service Quotas, Amazon EC2", [])
        for shape, _ in asked
        if _family(shape.name) not in families
    ]
    return looks


def _look_at_quota(quota: Quota, limit: float, used: int, asked: list[tuple[Shape, int]], region: str) -> Look:
    needed = sum(count * shape.vcpus for shape, count in asked)
    what = " and ".join(f"{count} x {shape.name}" for shape, count in asked)
    seen = f"{quota.name}: {limit:g} vCPU, {used} used outside this stack, {what} need {needed}"
    if used + needed <= limit:
        return seen, []
    return seen, [
        Finding(
            what=f"the quota of {limit:g} vCPU is too small for {what}",
            where=f"Service Quotas, Amazon EC2, {quota.name}, {region}",
            got=f"{limit:g}, of which {used} are used outside this stack",
            expected=f"{used + needed} or more",
            command="aws service-quotas request-service-quota-increase takes days; or lower NODES= and max_nodes",
        )
    ]


def _family(instance_type: str) -> str:
    """Letters before the generation: `m` in m7i.8xlarge, `trn` in trn1.32xlarge."""
    return "".join(takewhile(str.isalpha, instance_type))


def _list_running(account: Account) -> list[dict[str, Any]]:
    filters = [{"Name": "instance-state-name", "Values": list(RUNNING)}]
    reservations = account.pages("ec2", "describe_instances", "Reservations", Filters=filters)
    return [instance for reservation in reservations for instance in reservation["Instances"]]


def _is_of(instance: dict[str, Any], stack: str) -> bool:
    return has_stack_tag(instance.get("Tags"), stack)


def _vcpus_of(instance: dict[str, Any]) -> int:
    shape = read_shapes().get(instance["InstanceType"])
    if shape:
        return shape.vcpus
    cpu = instance.get("CpuOptions") or {}
    return int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))


def _look_at_addresses(
    account: Account,
    inputs: Inputs,
    nodes: int,
    up: int,
    find_addresses_per_node: Callable[[], int | None],
    is_up: bool,
) -> Look:
    """Checks the addresses for nodes that are not up yet."""
    subnets = _trainium_subnets(account, inputs) if is_up else []
    if not subnets:
        return f"{inputs.name} has no Trainium subnet yet; terraform refuses one that is too small for max_nodes", []
    findings = []
    zones = sorted({subnet["AvailabilityZoneId"] for subnet in subnets})
    if len(subnets) > 1 or zones != [inputs.zone_id]:
        findings.append(
            Finding(
                what="the Trainium nodes are not in one subnet of the chosen zone, and a gang has to be in one zone",
                where=f"{_trainium_pool(inputs)}, {', '.join(subnet['SubnetId'] for subnet in subnets)}",
                got=", ".join(zones),
                expected=f"one subnet in {inputs.zone_id}",
                command="make infra-up DRY_RUN=1",
            )
        )
    name, free = subnets[0]["SubnetId"], subnets[0]["AvailableIpAddressCount"]
    per_node = find_addresses_per_node()
    if per_node is None:
        return f"{name} has {free} free; only terraform's state, which is not here, has the need of a node", findings
    to_come = max(nodes - up, 0)
    needed = to_come * per_node
    if free < needed:
        findings.append(
            Finding(
                what=f"{name} has too few addresses for {to_come} x {inputs.trainium_shape}",
                where=f"{name}, {subnets[0]['CidrBlock']}, {subnets[0]['AvailabilityZoneId']}",
                got=f"{free} free",
                expected=f"{needed}: {to_come} nodes of {per_node} addresses",
                command="make infra-leftovers shows unused interfaces; or choose a larger subnet, or fewer nodes",
            )
        )
    return f"{name} has {free} free, {needed} are needed for {to_come} nodes that are not up yet", findings


def _trainium_subnets(account: Account, inputs: Inputs) -> list[dict[str, Any]]:
    """The subnets in which Trainium nodes really start."""
    if inputs.has_cluster:
        ids = {
            name
            for group in list_node_groups(account, inputs.name)
            if group.pool == TRAINIUM
            for name in group.subnet_ids
        }
    else:
        queue = find_queue(account, f"{inputs.name}-{TRAINIUM}")
        ids = {name for each in (environments_of(account, queue) if queue else []) for name in each.subnet_ids}
    if not ids:
        return []
    found = account.client("ec2").describe_subnets(SubnetIds=sorted(ids))["Subnets"]
    return sorted(found, key=lambda subnet: subnet["SubnetId"])


def _trainium_pool(inputs: Inputs) -> str:
    """The pool's name in the account."""
    name = f"{inputs.name}-{TRAINIUM}"
    return f"node group {name}" if inputs.has_cluster else f"the compute environment of job queue {name}"


def _look_at_queues(account: Account, inputs: Inputs) -> list[Look]:
    """Checks Batch's queues, because Batch leaves the jobs of a broken queue RUNNABLE without any notice."""
    looks: list[Look] = []
    for queue in [] if inputs.has_cluster else list_queues(account, inputs.name):
        problems = [*filter(None, (queue.problem, *(each.problem for each in environments_of(account, queue))))]
        findings = [
            Finding(
                what=f"job queue {queue.name} starts no jobs",
                where=f"AWS Batch, {account.region}",
                got=problem,
                expected="ENABLED and VALID",
                command="remove the cause that Batch names, then make infra-up STACK=batch",
            )
            for problem in problems
        ]
        looks.append((f"{queue.name} accepts jobs" if not problems else "; ".join(problems), findings))
    return looks


def _look_at_capacity(account: Account, inputs: Inputs, shape: Shape, nodes: int, up: int) -> Look:
    if inputs.capacity_kind == "on_demand":
        return "on demand: nothing is reserved, and EC2 may have no capacity at that moment", []
    found = account.client("ec2").describe_capacity_reservations(CapacityReservationIds=[inputs.reservation_id])
    [reservation] = found["CapacityReservations"]
    return judge_reservation(reservation, inputs, shape, nodes, up, datetime.now(UTC))


def _look_at_images(account: Account, inputs: Inputs, images: dict[str, str], is_up: bool) -> Look:
    """Checks the images' tags. Before the first `infra-up` the stack has no repositories, which is no finding."""
    is_given = bool(inputs.registry_id)
    registry = {"registryId": inputs.registry_id} if inputs.registry_id else {}
    lacking = {
        repository
        for repository in images
        if not account.find("ecr", "describe_repositories", repositoryNames=[repository], **registry)
    }
    findings = [
        Finding(
            f"no repository for {repository}",
            f"ECR, {repository}, {account.region}",
            "none",
            f"{repository}:{images[repository]}",
            f"aws ecr create-repository --repository-name {repository}" if is_given else "make infra-up",
        )
        for repository in sorted(lacking)
        if is_up or is_given
    ]
    there = [repository for repository in images if repository not in lacking]
    variant = find_variant(inputs.trainium_shape)
    without_tag = [found for name in there if (found := _find_image(account, registry, name, images[name], variant))]
    seen = f"{len(there) - len(without_tag)} of {len(images)} tags are in ECR"
    if lacking and not findings:
        seen += f"; infra-up will make {', '.join(sorted(lacking))}"
    return seen, findings + without_tag


def _find_image(account: Account, registry: dict[str, str], repository: str, tag: str, variant: str) -> Finding | None:
    asked = {"repositoryName": repository, "imageIds": [{"imageTag": tag}], **registry}
    if account.find("ecr", "describe_images", **asked):
        return None
    service = repository.rpartition("/")[2]
    push = f"make images STAGE={service} VARIANT={variant} PUSH=REGISTRY, or TAG= with an existing tag"
    where = f"ECR, {repository}, {account.region}"
    return Finding(f"no image {repository}:{tag}", where, "other tags, or none", tag, push)
