"""Checks in the account what would make `infra-up` or a first deployment fail later, at a higher price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from images.platforms import explain_no_image, find_variant
from infra.account.batch_queues import environments_of, find_queue, list_queues
from infra.account.managed_node_groups import TRAINIUM, list_node_groups
from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.preflight.capacity_reservation import judge_reservation
from infra.preflight.default_security_group import check_default_group
from infra.preflight.kubernetes_versions import check_addons, check_kubernetes
from infra.preflight.machine_images import check_machine_images
from infra.preflight.requirement import CheckResult, Finding
from infra.shapes import Shape, find_shape, read_shapes
from infra.teardown.leftovers import has_stack_tag, list_instances
from infra.workloads.kubernetes_cluster import find_endpoint

Instance = dict[str, Any]
# Quotas of on-demand vCPUs in a region, with the letters before the generation in the names of their types. They are
# found by name, because only the account has their codes.
QUOTAS = {
    "Running On-Demand Trn instances": ("trn",),
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": (
        *("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"),
    ),
}


@dataclass(frozen=True)
class Request:
    """What preflight checks the account for."""

    account: Account
    inputs: Inputs
    nodes: int
    images: dict[str, str]
    """Tags that a deployment would use, by repository."""
    find_addresses_per_node: Callable[[], int | None]
    """Returns how many addresses a node takes, None if unknown. Called only if the Trainium subnet exists."""
    running: list[Instance]
    is_up: bool
    """Whether the stack has a cluster or queues that accept deployments."""

    @property
    def shape(self) -> Shape:
        return find_shape(self.inputs.trainium_shape)

    @property
    def up(self) -> int:
        """Nodes of the pool that are up, which have their quota and addresses already."""
        return sum(each["InstanceType"] == self.shape.name and self.is_own(each) for each in self.running)

    def is_own(self, instance: Instance) -> bool:
        return has_stack_tag(instance.get("Tags"), self.inputs.name)


def run_preflight(
    account: Account,
    inputs: Inputs,
    nodes: int,
    images: dict[str, str],
    find_addresses_per_node: Callable[[], int | None],
) -> list[Finding]:
    """Prints one or more lines per check, and returns the requirements that are not met.

    Raises `DeviceError` without credentials. `Request` describes the arguments.
    """
    caller = account.client("sts").get_caller_identity()
    print(f"account     {caller['Account']} as {caller['Arn']}, {account.region}", flush=True)
    running = list(list_instances(account, [{"Name": "instance-state-name", "Values": ["pending", "running"]}]))
    is_cluster_up = inputs.has_cluster and find_endpoint(account, inputs.name) is not None
    is_up = is_cluster_up if inputs.has_cluster else bool(list_queues(account, inputs.name))
    request = Request(account, inputs, nodes, images, find_addresses_per_node, running, is_up)
    checks: dict[str, Callable[[], list[CheckResult]]] = {
        "device": lambda: [_check_device(inputs)],
        "kubernetes": lambda: check_kubernetes(account, inputs),
        "AMI": lambda: check_machine_images(account, inputs, is_up),
        "add-ons": lambda: check_addons(account, inputs),
        "groups": lambda: check_default_group(account, inputs),
        "zone": lambda: _check_zones(account, inputs),
        "quota": lambda: list(_check_quotas(request)),
        "addresses": lambda: [_check_addresses(request)],
        "capacity": lambda: [_check_capacity(request)],
        "queues": lambda: list(_check_queues(account, inputs)),
        "images": lambda: [_check_images(request)],
    }
    findings: list[Finding] = []
    for title, check in checks.items():
        results = check()
        for number, (seen, found) in enumerate(results):
            print(f"{'' if number else title:11} {'' if not found else 'NOT MET: '}{seen}", flush=True)
            findings += found
    return findings


def judge_device(inputs: Inputs) -> list[Finding]:
    """A finding if no image computes on the chosen instance type, which would cost money and train nothing."""
    problem = explain_no_image(inputs.trainium_shape)
    if not problem:
        return []
    fitting = [name for name, shape in read_shapes().items() if shape.neuron_devices and not explain_no_image(name)]
    return [
        Finding(
            what=problem,
            where="variable trainium",
            got=inputs.trainium_shape,
            expected=f"one of {', '.join(fitting)}",
            command="write one of them into trainium.shape of terraform.tfvars, with a region and zone that offer it",
        )
    ]


def _check_device(inputs: Inputs) -> CheckResult:
    found = judge_device(inputs)
    return f"{'no image computes' if found else 'images compute'} on {inputs.trainium_shape}", found


def _check_zones(account: Account, inputs: Inputs) -> list[CheckResult]:
    """Checks that the zone, in which all nodes are, offers each of their types."""
    names = dict.fromkeys((inputs.trainium_shape, inputs.cpu_shape, inputs.core_shape))
    return [_check_zone(account, inputs.zone_id, find_shape(name)) for name in names if name]


def _check_zone(account: Account, zone_id: str, shape: Shape) -> CheckResult:
    asked = {"LocationType": "availability-zone-id", "Filters": [{"Name": "instance-type", "Values": [shape.name]}]}
    offers = account.pages("ec2", "describe_instance_type_offerings", "InstanceTypeOfferings", **asked)
    offered = sorted(each["Location"] for each in offers)
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


def _check_quotas(request: Request) -> Iterator[CheckResult]:
    """Checks the vCPU quotas. The stack's own running instances are in the request anyway."""
    inputs = request.inputs
    asked = {inputs.core_shape: inputs.core_nodes, inputs.cpu_shape: inputs.cpu_max_nodes}
    if inputs.core_shape == inputs.cpu_shape:
        asked = {inputs.cpu_shape: inputs.core_nodes + inputs.cpu_max_nodes}
    if inputs.capacity_kind == "on_demand":
        asked |= {inputs.trainium_shape: request.nodes}
    else:
        yield f"{inputs.trainium_shape}: the {inputs.capacity_kind} needs no on-demand quota", []
    known = request.account.pages("service-quotas", "list_service_quotas", "Quotas", ServiceCode="ec2")
    limits = {each["QuotaName"]: each["Value"] for each in known}
    for quota, families in QUOTAS.items():
        counted = [(find_shape(name), count) for name, count in asked.items() if count and _family(name) in families]
        if counted:
            others = (each for each in request.running if not request.is_own(each))
            used = sum(_vcpus_of(each) for each in others if _family(each["InstanceType"]) in families)
            yield _check_quota(quota, limits.get(quota, 0.0), used, counted, request.account.region)


def _check_quota(quota: str, limit: float, used: int, asked: list[tuple[Shape, int]], region: str) -> CheckResult:
    needed = sum(count * shape.vcpus for shape, count in asked)
    what = " and ".join(f"{count} x {shape.name}" for shape, count in asked)
    seen = f"{quota}: {limit:g} vCPU, {used} used outside this stack, {what} need {needed}"
    if used + needed <= limit:
        return seen, []
    return seen, [
        Finding(
            what=f"the quota of {limit:g} vCPU is too small for {what}",
            where=f"Service Quotas, Amazon EC2, {quota}, {region}",
            got=f"{limit:g}, of which {used} are used outside this stack",
            expected=f"{used + needed} or more",
            command="aws service-quotas request-service-quota-increase takes days; or lower NODES= and max_nodes",
        )
    ]


def _family(instance_type: str) -> str:
    """Letters before the generation: `m` in m7i.8xlarge, `trn` in trn1.32xlarge."""
    return "".join(takewhile(str.isalpha, instance_type))


def _vcpus_of(instance: Instance) -> int:
    if shape := read_shapes().get(instance["InstanceType"]):
        return shape.vcpus
    cpu = instance.get("CpuOptions") or {}
    return int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))


def _check_addresses(request: Request) -> CheckResult:
    """Checks the addresses for nodes that are not up yet."""
    account, inputs = request.account, request.inputs
    subnets = _trainium_subnets(account, inputs) if request.is_up else []
    if not subnets:
        return f"{inputs.name} has no Trainium subnet yet; terraform refuses one that is too small for max_nodes", []
    findings, names = [], ", ".join(subnet["SubnetId"] for subnet in subnets)
    zones = sorted({subnet["AvailabilityZoneId"] for subnet in subnets})
    if len(subnets) > 1 or zones != [inputs.zone_id]:
        pool = "node group" if inputs.has_cluster else "the compute environment of job queue"
        findings.append(
            Finding(
                what="the Trainium nodes are not in one subnet of the chosen zone, and a gang has to be in one zone",
                where=f"{pool} {inputs.name}-{TRAINIUM}, {names}",
                got=", ".join(zones),
                expected=f"one subnet in {inputs.zone_id}",
                command="make infra-up DRY_RUN=1",
            )
        )
    name, free = subnets[0]["SubnetId"], subnets[0]["AvailableIpAddressCount"]
    per_node = request.find_addresses_per_node()
    if per_node is None:
        return f"{name} has {free} free; only terraform's state, which is not here, has the need of a node", findings
    to_come = max(request.nodes - request.up, 0)
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
        groups = list_node_groups(account, inputs.name)
        ids = {name for group in groups if group.pool == TRAINIUM for name in group.subnet_ids}
    else:
        queue = find_queue(account, f"{inputs.name}-{TRAINIUM}")
        ids = {name for each in (environments_of(account, queue) if queue else []) for name in each.subnet_ids}
    if not ids:
        return []
    found = account.client("ec2").describe_subnets(SubnetIds=sorted(ids))["Subnets"]
    return sorted(found, key=lambda subnet: subnet["SubnetId"])


def _check_queues(account: Account, inputs: Inputs) -> Iterator[CheckResult]:
    """Checks Batch's queues, because Batch leaves the jobs of a broken queue RUNNABLE without any notice."""
    for queue in [] if inputs.has_cluster else list_queues(account, inputs.name):
        problems = [*filter(None, (queue.problem, *(each.problem for each in environments_of(account, queue))))]
        command = "remove the cause that Batch names, then make infra-up STACK=batch"
        where, what = f"AWS Batch, {account.region}", f"job queue {queue.name} starts no jobs"
        findings = [Finding(what, where, problem, "ENABLED and VALID", command) for problem in problems]
        yield "; ".join(problems) or f"{queue.name} accepts jobs", findings


def _check_capacity(request: Request) -> CheckResult:
    inputs = request.inputs
    if inputs.capacity_kind == "on_demand":
        return "on demand: nothing is reserved, and EC2 may have no capacity at that moment", []
    ec2 = request.account.client("ec2")
    [found] = ec2.describe_capacity_reservations(CapacityReservationIds=[inputs.reservation_id])["CapacityReservations"]
    return judge_reservation(found, inputs, request.nodes, request.up, datetime.now(UTC))


def _check_images(request: Request) -> CheckResult:
    """Checks the images' tags. Before the first `infra-up` the stack has no repositories, which is no finding."""
    account, is_given = request.account, bool(request.inputs.registry_id)
    registry = {"registryId": request.inputs.registry_id} if is_given else {}
    variant = find_variant(request.inputs.trainium_shape)
    lacking, findings, present = [], [], 0
    for repository, tag in sorted(request.images.items()):
        where = f"ECR, {repository}, {account.region}"
        if not account.find("ecr", "describe_repositories", repositoryNames=[repository], **registry):
            lacking.append(repository)
            make = f"aws ecr create-repository --repository-name {repository}" if is_given else "make infra-up"
            if request.is_up or is_given:
                findings.append(Finding(f"no repository for {repository}", where, "none", f"{repository}:{tag}", make))
        elif account.find(
            "ecr", "describe_images", repositoryName=repository, imageIds=[{"imageTag": tag}], **registry
        ):
            present += 1
        else:
            service = repository.rpartition("/")[2]
            push = f"make images STAGE={service} VARIANT={variant} PUSH=REGISTRY, or TAG= with an existing tag"
            findings.append(Finding(f"no image {repository}:{tag}", where, "other tags, or none", tag, push))
    seen = f"{present} of {len(request.images)} tags are in ECR"
    if lacking and not (request.is_up or is_given):
        seen += f"; infra-up will make {', '.join(lacking)}"
    return seen, findings
