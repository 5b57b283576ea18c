"""Checks in the account what would make a first deployment fail later, at a higher price.

Terraform's plan checks the rest: whether the zone offers the instance types, the machine image, and the subnet's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any

from deploy.reservation import RESERVATION_MARGIN
from images.platforms import explain_no_image, find_variant, read_neuron_nodes
from infra.account.session import STACK_TAG, Account, tags_of
from infra.apply.inputs import Inputs
from infra.aws_releases import read_machine_images
from infra.shapes import find_shape, read_shapes
from infra.teardown.leftovers import list_instances

Instance = dict[str, Any]
CheckResult = tuple[str, list[str]]  # what was seen, in one line, and the requirements that are not met
TABLE = "infra/aws_releases.json"
SAME_TIME = timedelta(minutes=1)
MINUTE = "%Y-%m-%d %H:%M UTC"
ALL, INTERNET = "-1", "0.0.0.0/0"
# Quotas of on-demand vCPUs in a region, with the letters before the generation in the names of their types. They are
# found by name, because only the account has their codes.
QUOTAS = {
    "Running On-Demand Trn instances": ("trn",),
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": (
        *("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"),
    ),
}


def run_preflight(account: Account, inputs: Inputs, nodes: int) -> list[str]:
    """Prints one or more lines per check, and returns the requirements that are not met."""
    caller = account.client("sts").get_caller_identity()
    print(f"account     {caller['Account']} as {caller['Arn']}, {account.region}", flush=True)
    running = list(list_instances(account, [{"Name": "instance-state-name", "Values": ["pending", "running"]}]))
    own = [each for each in running if tags_of(each).get(STACK_TAG) == inputs.name]
    others = [each for each in running if tags_of(each).get(STACK_TAG) != inputs.name]
    up = sum(each["InstanceType"] == inputs.trainium.shape for each in own)
    checks: dict[str, Callable[[], Iterable[CheckResult]]] = {"device": lambda: [check_machine_image(inputs)]}
    if inputs.subnet_id:
        checks["groups"] = lambda: [_check_default_group(account, inputs.subnet_id)]
    checks["quota"] = lambda: _check_quotas(account, inputs, nodes, others)
    checks["capacity"] = lambda: [_check_capacity(account, inputs, nodes, up)]
    problems: list[str] = []
    for title, check in checks.items():
        for number, (seen, found) in enumerate(check()):
            print(f"{'' if number else title:11} {'NOT MET: ' if found else ''}{seen}", flush=True)
            problems += found
    return problems


def _check_quotas(account: Account, inputs: Inputs, nodes: int, others: list[Instance]) -> Iterator[CheckResult]:
    """Checks the vCPU quotas. The stack's own running instances are in the request anyway."""
    asked = [(inputs.cpu_nodes.shape, inputs.cpu_nodes.max_nodes)]
    if inputs.core_nodes:
        asked.insert(0, (inputs.core_nodes.shape, inputs.core_nodes.nodes))
    if inputs.capacity.kind == "on_demand":
        asked.append((inputs.trainium.shape, nodes))
    else:
        yield f"{inputs.trainium.shape}: the {inputs.capacity.kind} needs no on-demand quota", []
    known = account.pages("service-quotas", "list_service_quotas", "Quotas", ServiceCode="ec2")
    limits = {each["QuotaName"]: each["Value"] for each in known}
    for quota, families in QUOTAS.items():
        counted = [(name, count) for name, count in asked if count and _family(name) in families]
        if not counted:
            continue
        used = sum(_vcpus_of(each) for each in others if _family(each["InstanceType"]) in families)
        needed, limit = sum(count * find_shape(name).vcpus for name, count in counted), limits.get(quota, 0.0)
        what = " and ".join(f"{count} x {name}" for name, count in counted)
        seen = f"{quota}: {limit:g} vCPU, {used} used outside this stack, {what} need {needed}"
        raised = f"{seen} in {account.region}, expected {used + needed} or more"
        advice = "raise it in the console (Service Quotas > EC2; hours to days), or check for fewer nodes with NODES="
        yield seen, [] if used + needed <= limit else [f"{raised}. {advice}"]


def _family(instance_type: str) -> str:
    """Letters before the generation: `m` in m7i.8xlarge, `trn` in trn1.32xlarge."""
    return "".join(takewhile(str.isalpha, instance_type))


def _vcpus_of(instance: Instance) -> int:
    if shape := read_shapes().get(instance["InstanceType"]):
        return shape.vcpus
    cpu = instance.get("CpuOptions") or {}
    return int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))


def _check_capacity(account: Account, inputs: Inputs, nodes: int, up: int) -> CheckResult:
    if inputs.capacity.kind == "on_demand":
        return "on demand: nothing is reserved, and EC2 may have no capacity at that moment", []
    ec2, names = account.client("ec2"), [inputs.capacity.reservation_id]
    [found] = ec2.describe_capacity_reservations(CapacityReservationIds=names)["CapacityReservations"]
    return check_reservation(found, inputs, nodes, up, datetime.now(UTC))


def check_reservation(reservation: dict[str, Any], inputs: Inputs, nodes: int, up: int, now: datetime) -> CheckResult:
    """Checks a reservation against the request for `nodes`, of which `up` already run in it.

    `reservation` is an item of EC2's DescribeCapacityReservations.
    """
    capacity = inputs.capacity
    start, end, total = reservation.get("StartDate"), reservation.get("EndDate"), reservation["TotalInstanceCount"]
    is_block = reservation.get("ReservationType") == "capacity-block"
    is_to_come = bool(start and start > now)
    usable_until = end - RESERVATION_MARGIN if end and is_block else end
    free = total if is_to_come else reservation["AvailableInstanceCount"]
    chosen_end = datetime.fromisoformat(capacity.ends_at) if capacity.ends_at else None
    has_same_end = abs(end - chosen_end) <= SAME_TIME if end and chosen_end else end == chosen_end
    actual_end = f"{end:%Y-%m-%dT%H:%M:%SZ}" if end else ""
    facts = {
        "trainium.shape": (reservation["InstanceType"], inputs.trainium.shape),
        "zone_id": (reservation["AvailabilityZoneId"], inputs.zone_id),
        "capacity.kind": ("capacity_block" if is_block else "reservation", capacity.kind),
        "capacity.ends_at": (capacity.ends_at if has_same_end else actual_end, capacity.ends_at),
    }
    problems = [
        f'{name} is "{chosen}", and the reservation\'s is "{actual}": write {name} = "{actual}", then make infra-up'
        for name, (actual, chosen) in facts.items()
        if actual != chosen
    ]
    if is_to_come or reservation["State"] != "active":
        problems.append(
            f"it is {reservation['State']}{f' until {start:{MINUTE}}' if is_to_come else ''}, expected active"
        )
    if free + up < nodes:
        problems.append(f"it has {free} free nodes, and {up} that this stack uses, expected {nodes} or more")
    if usable_until and usable_until <= now:
        problems.append(f"it was usable until {usable_until:{MINUTE}}")
    seen = f"{capacity.reservation_id}: {free} of {total} free"
    seen += f", from {start:{MINUTE}}" if is_to_come else ""
    seen += f", until {usable_until:{MINUTE}}" if usable_until else ""
    show = f"aws ec2 describe-capacity-reservations --capacity-reservation-ids {capacity.reservation_id} shows it"
    return seen, [f"capacity reservation {capacity.reservation_id}: {each}. {show}" for each in problems]


def _check_default_group(account: Account, subnet_id: str) -> CheckResult:
    """Checks the default group of an existing subnet's VPC for traffic from and to itself, and HTTPS to the internet.

    According to one of two AWS pages, containers on Batch's Trainium nodes are in that group (modules/batch cites
    both). The stack opens the default group of a VPC that it makes; the owner of an existing VPC decides about its own.
    """
    ec2 = account.client("ec2")
    [subnet] = ec2.describe_subnets(SubnetIds=[subnet_id])["Subnets"]
    of_vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    [group] = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"]
    name, inward, outward = group["GroupId"], group["IpPermissions"], group["IpPermissionsEgress"]
    wanted = {
        f"ingress --group-id {name} --protocol -1 --source-group {name}": _admits(inward, name, ALL),
        f"egress --group-id {name} --protocol -1 --source-group {name}": _admits(outward, name, ALL),
        f"egress --group-id {name} --protocol tcp --port 443 --cidr {INTERNET}": _admits(outward, "", "tcp"),
    }
    seen = f"{name}, the default one of {subnet['VpcId']}"
    return seen, [
        f"security group {seen}, in which containers on Trainium nodes may be, lacks a rule: "
        f"aws ec2 authorize-security-group-{command}"
        for command, is_there in wanted.items()
        if not is_there
    ]


def _admits(rules: list[dict[str, Any]], group: str, protocol: str) -> bool:
    """Whether a rule admits the protocol, and of TCP port 443, from or to the group or everywhere."""
    return any(
        rule["IpProtocol"] in (protocol, ALL)
        and (rule["IpProtocol"] == ALL or rule["FromPort"] <= 443 <= rule["ToPort"])
        and (
            any(pair["GroupId"] == group for pair in rule["UserIdGroupPairs"])
            or any(each["CidrIp"] == INTERNET for each in rule["IpRanges"])
        )
        for rule in rules
    )


def check_machine_image(inputs: Inputs) -> CheckResult:
    """Checks the instance type and the machine image before a node is paid for that trains nothing."""
    shape = inputs.trainium.shape
    variant = find_variant(shape)
    if not variant:
        fitting = [name for name, facts in read_shapes().items() if facts.neuron_devices and find_variant(name)]
        command = f"Write one of {', '.join(fitting)} into trainium.shape, with a region and zone that offer it"
        return f"no image computes on {shape}", [f"{explain_no_image(shape)}. {command}"]
    if inputs.has_cluster and not inputs.kubernetes_version:
        return f"images compute on {shape}; the stack chooses its machine image itself", []
    images = read_machine_images("eks" if inputs.has_cluster else "ecs", shape)
    release = inputs.ami_id or inputs.ami_release or images.default
    # AWS alone knows the name behind an ami_id, so Terraform's plan looks that up in the table.
    if release in images.drivers or (inputs.ami_id and images.drivers):
        return f"images compute on {shape}, and accept the Neuron driver of {release}", []
    seen = f"{TABLE} lists no AMI release {release} for {shape}"
    return seen, [
        f"{seen}, but {', '.join(images.drivers) or 'none'}. To add one, look up its aws-neuronx-dkms in "
        f"{images.look_up}; the images accept {read_neuron_nodes()[variant].describe_drivers()}"
    ]
