"""Checks in the account what would make a first deployment fail later, at a higher price.

Terraform's plan checks the rest: whether the zone offers the instance types, the machine image, and the subnet's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from images.platforms import find_variant
from infra.account.session import STACK_TAG, Account, tags_of
from infra.apply.inputs import Inputs
from infra.preflight.capacity_reservation import check_reservation
from infra.preflight.default_security_group import check_default_group
from infra.preflight.kubernetes_versions import check_addons, check_kubernetes
from infra.preflight.machine_images import check_machine_image
from infra.preflight.requirement import CheckResult
from infra.shapes import find_shape, read_shapes
from infra.teardown.leftovers import list_instances

Instance = dict[str, Any]
# Quotas of on-demand vCPUs in a region, with the letters before the generation in the names of their types. They are
# found by name, because only the account has their codes.
QUOTAS = {
    "Running On-Demand Trn instances": ("trn",),
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": (
        *("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"),
    ),
}


def run_preflight(account: Account, inputs: Inputs, nodes: int, images: dict[str, str]) -> list[str]:
    """Prints one or more lines per check, and returns the requirements that are not met.

    `images` are the tags that a deployment would use, by repository. Raises `DeviceError` without credentials.
    """
    caller = account.client("sts").get_caller_identity()
    print(f"account     {caller['Account']} as {caller['Arn']}, {account.region}", flush=True)
    running = list(list_instances(account, [{"Name": "instance-state-name", "Values": ["pending", "running"]}]))
    own = [each for each in running if tags_of(each).get(STACK_TAG) == inputs.name]
    others = [each for each in running if tags_of(each).get(STACK_TAG) != inputs.name]
    up = sum(each["InstanceType"] == inputs.trainium.shape for each in own)
    checks: dict[str, Callable[[], Iterable[CheckResult]]] = {"device": lambda: [check_machine_image(inputs)]}
    if inputs.kubernetes_version:
        checks["kubernetes"] = lambda: [check_kubernetes(account, inputs)]
        checks["add-ons"] = lambda: [check_addons(account, inputs)]
    if inputs.subnet_id:
        checks["groups"] = lambda: [check_default_group(account, inputs.subnet_id)]
    checks["quota"] = lambda: _check_quotas(account, inputs, nodes, others)
    checks["capacity"] = lambda: [_check_capacity(account, inputs, nodes, up)]
    checks["images"] = lambda: [_check_images(account, inputs, images)]
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


def _check_images(account: Account, inputs: Inputs, images: dict[str, str]) -> CheckResult:
    """Checks the images' tags in existing repositories. The stack makes those that are not there, unless others do."""
    registry = {"registryId": inputs.registry_id} if inputs.registry_id else {}
    variant, missing, problems = find_variant(inputs.trainium.shape), [], []
    for repository, tag in sorted(images.items()):
        wanted, asked = f"{repository}:{tag}", {"repositoryName": repository, "imageIds": [{"imageTag": tag}]}
        if not account.find("ecr", "describe_repositories", repositoryNames=[repository], **registry):
            missing.append(repository)
            if registry:
                command = f"aws ecr create-repository --repository-name {repository}"
                problems.append(f"no repository for {wanted} in {account.region}: {command}")
        elif not account.find("ecr", "describe_images", **asked, **registry):
            make = f"make images STAGE={repository.rpartition('/')[2]} VARIANT={variant} PUSH=REGISTRY"
            problems.append(f"no image {wanted} in {account.region}: {make}, or name an existing tag with TAG=")
    lacking = f"; infra-up makes {', '.join(missing)}" if missing and not registry else ""
    present = len(images) - len(problems) - (0 if registry else len(missing))
    return f"{present} of {len(images)} tags are in ECR{lacking}", problems
