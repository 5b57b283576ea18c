"""Checks whether Trainium nodes start from a machine image whose Neuron driver the stages' images accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from images.platforms import NeuronNode, find_variant, read_neuron_nodes
from infra.account.batch_queues import environments_of, find_queue
from infra.account.managed_node_groups import TRAINIUM, list_node_groups
from infra.account.session import Account
from infra.apply.inputs import Inputs
from infra.aws_releases import (
    AWS_RELEASES_JSON,
    MachineImages,
    name_of_eks_release,
    read_ecs_machine_images,
    read_eks_machine_images,
)
from infra.preflight.requirement import CheckResult, Finding

TABLE = f"infra/{AWS_RELEASES_JSON.name}"


def check_machine_images(account: Account, inputs: Inputs, is_up: bool) -> list[CheckResult]:
    """Checks the chosen machine image, and with `is_up` the one that nodes really start from.

    Empty for an EKS stack without the variable kubernetes_version, which chooses its machine images differently.
    """
    if inputs.has_cluster and not inputs.kubernetes_version:
        return []
    if inputs.has_cluster:
        chosen = _judge_release(inputs)
        if not chosen[1]:
            images = read_eks_machine_images()[inputs.kubernetes_version]
            release = inputs.ami_release or images.default
            if _find_image(account, name_of_eks_release(release)) is None:
                chosen = _describe_absent(account, images, release, "ami_release")
        return [chosen, *(_check_node_groups(account, inputs) if is_up else ())]
    images = read_ecs_machine_images()
    found = _find_image(account, inputs.ami_id or images.default)
    if found is None:
        return [_describe_absent(account, images, inputs.ami_id or images.default, "ami_id")]
    chosen = _judge_image(found, inputs, images, "variable ami_id", "leave ami_id out, for the default")
    return [chosen, *(_check_environments(account, inputs, images, found) if is_up else ())]


def judge_machine_image(inputs: Inputs) -> list[Finding]:
    """A finding if the images do not accept the chosen machine image's driver, as far as the table alone can tell.

    AWS alone knows the name behind an `ami_id`, which Terraform requires the table to list. So that is refused here
    only if no release of the table fits.
    """
    if inputs.has_cluster:
        return _judge_release(inputs)[1] if inputs.kubernetes_version else []
    images, node = read_ecs_machine_images(), _find_node(inputs)
    if inputs.ami_id and (node is None or _list_fitting(node, images)):
        return []
    return _judge_driver(images.default, inputs, images, "variable ami_id", "choose another")[1]


def _judge_release(inputs: Inputs) -> CheckResult:
    """Checks the chosen release of EKS' machine image against the table."""
    tables, version = read_eks_machine_images(), inputs.kubernetes_version
    if version in tables:
        release, where = inputs.ami_release or tables[version].default, "variable ami_release"
        return _judge_driver(release, inputs, tables[version], where, "leave ami_release out, for the default")
    page = next(iter(tables.values())).look_up
    return f"no release for Kubernetes {version} is in {TABLE}", [
        Finding(
            what=f"{TABLE} lists no release of EKS' Neuron AMI for Kubernetes {version}",
            where=f"{TABLE}, variable kubernetes_version",
            got=version,
            expected=f"one of {', '.join(tables)}",
            command=f"choose one of them, or look up its releases in {page} and add them there",
        )
    ]


def _check_node_groups(account: Account, inputs: Inputs) -> Iterator[CheckResult]:
    """Checks the Trainium node groups, which keep their release until `infra-up` gives them another."""
    tables = read_eks_machine_images()
    for group in list_node_groups(account, inputs.name):
        if group.pool == TRAINIUM and group.ami_release:
            images = tables.get(group.ami_release.rpartition(".")[0]) or next(iter(tables.values()))
            where = f"node group {group.name}"
            _, found = _judge_driver(group.ami_release, inputs, images, where, "make infra-up, with no job")
            yield f"{where} has {group.ami_release}", found


def _check_environments(
    account: Account, inputs: Inputs, images: MachineImages, chosen: dict[str, Any]
) -> Iterator[CheckResult]:
    queue = find_queue(account, f"{inputs.name}-{TRAINIUM}")
    for environment in environments_of(account, queue) if queue else ():
        for ami_id in environment.ami_ids:
            if ami_id != chosen["ImageId"]:
                found = _find_image(account, ami_id) or {"ImageId": ami_id, "Name": "a deleted image"}
                where = f"compute environment {environment.name}"
                yield _judge_image(found, inputs, images, where, "make infra-up STACK=batch, with no job")


def _judge_image(found: dict[str, Any], inputs: Inputs, images: MachineImages, where: str, command: str) -> CheckResult:
    title = f"{found['Name']} ({found['ImageId']})"
    return _judge_driver(found["Name"], inputs, images, where, command, title)


def _judge_driver(
    release: str, inputs: Inputs, images: MachineImages, where: str, command: str, title: str = ""
) -> CheckResult:
    """Checks that the table lists the release, and that the images of the chosen type accept its driver."""
    node, driver, title = _find_node(inputs), images.drivers.get(release, ""), title or release
    if driver and (node is None or node.takes_driver(driver)):
        return f"{title} has Neuron driver {driver}, which the images accept", []
    expected = f"{node.describe_drivers()} (images/platforms.toml)" if node else "a type that images compute on"
    fitting = ", ".join(_list_fitting(node, images)) if node else ""
    problem = f"do not accept the Neuron driver {driver}" if driver else "may not accept the Neuron driver"
    return f"the images {problem} of {title}", [
        Finding(
            what=f"the images for {inputs.trainium_shape} {problem} of {title}",
            where=where,
            got=driver or release,
            expected=f"{expected}: {f'one of {fitting}' if fitting else f'{TABLE} lists no such release'}",
            command=(
                f"{command}; or look up its aws-neuronx-dkms in {images.look_up}, and add a release to {TABLE} whose "
                f"driver the images accept"
            ),
        )
    ]


def _find_node(inputs: Inputs) -> NeuronNode | None:
    """Return what the images for the chosen instance type require of a node; None where no image computes on it."""
    variant = find_variant(inputs.trainium_shape)
    return read_neuron_nodes()[variant] if variant else None


def _list_fitting(node: NeuronNode, images: MachineImages) -> list[str]:
    return [release for release, driver in images.drivers.items() if node.takes_driver(driver)]


def _find_image(account: Account, name_or_id: str) -> dict[str, Any] | None:
    """Finds a release of AWS by name, or any image by id. None if the region has no such image."""
    asked: dict[str, Any] = {"Owners": ["amazon"], "Filters": [{"Name": "name", "Values": [name_or_id]}]}
    if name_or_id.startswith("ami-"):
        asked = {"ImageIds": [name_or_id]}
    found = account.find("ec2", "describe_images", IncludeDeprecated=True, **asked)
    return dict(found["Images"][0]) if found and found["Images"] else None


def _describe_absent(account: Account, images: MachineImages, release: str, variable: str) -> CheckResult:
    others = ", ".join(each for each in images.drivers if each != release) or "none"
    return f"{account.region} has no {release}", [
        Finding(
            what=f"no machine image {release}",
            where=f"EC2, images of amazon, {account.region}; variable {variable}",
            got="none",
            expected=f"{release}, or another whose driver the images accept: {others}",
            command=f"write another of {TABLE} into {variable}; AWS may have withdrawn this one",
        )
    ]
