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
from infra.preflight.requirement import Finding, Look

TABLE = f"infra/{AWS_RELEASES_JSON.name}"


def look_at_machine_images(account: Account, inputs: Inputs, is_up: bool) -> list[Look]:
    """Checks the chosen machine image, and with `is_up` the one that nodes really start from.

    Empty for an EKS stack without the variable kubernetes_version, which chooses its machine images differently.
    """
    if inputs.has_cluster and not inputs.kubernetes_version:
        return []
    if inputs.has_cluster:
        chosen = _look_at_release(account, inputs)
        return [chosen, *(_look_at_node_groups(account, inputs) if is_up else ())]
    images = read_ecs_machine_images()
    found = _find_image(account, inputs.ami_id or images.default)
    if found is None:
        return [_describe_absent(account, images, inputs.ami_id or images.default, "ami_id")]
    chosen = _look_at_image(found, inputs, images, "variable ami_id", "leave ami_id out, for the default")
    return [chosen, *(_look_at_environments(account, inputs, images, found) if is_up else ())]


def judge_machine_image(inputs: Inputs) -> list[Finding]:
    """A finding if the images do not accept the chosen machine image's driver, as far as the table alone can tell.

    AWS alone knows the name behind an `ami_id`, which Terraform requires the table to list. So that is refused here
    only if no release of the table fits.
    """
    if inputs.has_cluster:
        return _judge_release(inputs)[1] if inputs.kubernetes_version else []
    images = read_ecs_machine_images()
    if not inputs.ami_id:
        return _look_at_driver(images.default, images.default, inputs, images, "variable ami_id")[1]
    node = _find_node(inputs)
    if node is None or any(node.takes_driver(driver) for driver in images.drivers.values()):
        return []
    drivers = ", ".join(sorted(set(images.drivers.values())))
    return [_describe_unfit(node, drivers, f"the releases in {TABLE}", inputs, images, "variable ami_id")]


def _look_at_release(account: Account, inputs: Inputs) -> Look:
    look = _judge_release(inputs)
    if look[1]:
        return look
    images = read_eks_machine_images()[inputs.kubernetes_version]
    release = inputs.ami_release or images.default
    if _find_image(account, name_of_eks_release(release)) is None:
        return _describe_absent(account, images, release, "ami_release")
    return look


def _judge_release(inputs: Inputs) -> Look:
    images = read_eks_machine_images().get(inputs.kubernetes_version)
    if images is None:
        known = ", ".join(read_eks_machine_images())
        return f"no release for Kubernetes {inputs.kubernetes_version} is in {TABLE}", [
            Finding(
                what=f"{TABLE} lists no release of EKS' Neuron AMI for Kubernetes {inputs.kubernetes_version}",
                where=f"{TABLE}, variable kubernetes_version",
                got=inputs.kubernetes_version,
                expected=f"one of {known}",
                command=f"choose one of them, or look up its releases in {_any_page()} and add them there",
            )
        ]
    release = inputs.ami_release or images.default
    if release not in images.drivers:
        command = "leave ami_release out, for the default"
        return _describe_unknown(release, inputs, images, "variable ami_release", command)
    return _look_at_driver(release, release, inputs, images, "variable ami_release")


def _look_at_node_groups(account: Account, inputs: Inputs) -> Iterator[Look]:
    """Checks the Trainium node groups, which keep their release until `infra-up` gives them another."""
    versions = read_eks_machine_images()
    for group in list_node_groups(account, inputs.name):
        if group.pool != TRAINIUM or not group.ami_release:
            continue
        images = versions.get(group.ami_release.rpartition(".")[0])
        if images is None or group.ami_release not in images.drivers:
            known = images or versions.get(inputs.kubernetes_version) or next(iter(versions.values()))
            where = f"node group {group.name}"
            yield _describe_unknown(group.ami_release, inputs, known, where, "make infra-up, with no job")
        else:
            where = f"node group {group.name}"
            _, found = _look_at_driver(group.ami_release, group.ami_release, inputs, images, where)
            yield f"{where} has {group.ami_release}", found


def _look_at_environments(
    account: Account, inputs: Inputs, images: MachineImages, chosen: dict[str, Any]
) -> Iterator[Look]:
    queue = find_queue(account, f"{inputs.name}-{TRAINIUM}")
    for environment in environments_of(account, queue) if queue else ():
        for ami_id in environment.ami_ids:
            if ami_id == chosen["ImageId"]:
                continue
            found = _find_image(account, ami_id) or {"ImageId": ami_id, "Name": "a deleted image"}
            where = f"compute environment {environment.name}"
            yield _look_at_image(found, inputs, images, where, "make infra-up STACK=batch, with no job")


def _look_at_image(found: dict[str, Any], inputs: Inputs, images: MachineImages, where: str, command: str) -> Look:
    name, title = found["Name"], f"{found['Name']} ({found['ImageId']})"
    if name not in images.drivers:
        return _describe_unknown(title, inputs, images, where, command)
    return _look_at_driver(name, title, inputs, images, where)


def _look_at_driver(release: str, title: str, inputs: Inputs, images: MachineImages, where: str) -> Look:
    """Checks that the images of the chosen instance type accept the driver of a release that the table lists."""
    node, driver = _find_node(inputs), images.drivers[release]
    if node is None or node.takes_driver(driver):
        return f"{title} has Neuron driver {driver}, which the images accept", []
    return f"{title} has Neuron driver {driver}, which the images for {inputs.trainium_shape} do not accept", [
        _describe_unfit(node, driver, title, inputs, images, where)
    ]


def _describe_unfit(
    node: NeuronNode, driver: str, title: str, inputs: Inputs, images: MachineImages, where: str
) -> Finding:
    return Finding(
        what=f"the images for {inputs.trainium_shape} do not accept the Neuron driver {driver} of {title}",
        where=where,
        got=driver,
        expected=f"{node.describe_drivers()} (images/platforms.toml): {_list_fitting(node, images)}",
        command=(
            f"look up a release with such a driver in {images.look_up}, add it to {TABLE}, and write "
            f"{'it into ami_release' if inputs.has_cluster else 'its id into ami_id'}"
        ),
    )


def _find_node(inputs: Inputs) -> NeuronNode | None:
    """Return what the images for the chosen instance type require of a node; None where no image computes on it."""
    variant = find_variant(inputs.trainium_shape)
    return read_neuron_nodes()[variant] if variant else None


def _list_fitting(node: NeuronNode, images: MachineImages) -> str:
    fitting = [release for release, driver in images.drivers.items() if node.takes_driver(driver)]
    return f"one of {', '.join(fitting)}" if fitting else f"{TABLE} lists no such release"


def _find_image(account: Account, name_or_id: str) -> dict[str, Any] | None:
    """Finds a release of AWS by name, or any image by id. None if the region has no such image."""
    is_id = name_or_id.startswith("ami-")
    asked: dict[str, Any] = (
        {"ImageIds": [name_or_id]}
        if is_id
        else {"Owners": ["amazon"], "Filters": [{"Name": "name", "Values": [name_or_id]}]}
    )
    found = account.find("ec2", "describe_images", IncludeDeprecated=True, **asked)
    return dict(found["Images"][0]) if found and found["Images"] else None


def _describe_unknown(release: str, inputs: Inputs, images: MachineImages, where: str, command: str) -> Look:
    node = _find_node(inputs)
    fitting = f"{node.describe_drivers()}: {_list_fitting(node, images)}" if node else "a type that images compute on"
    return f"{release} is not in {TABLE}", [
        Finding(
            what=f"the images may not accept the Neuron driver of {release}",
            where=where,
            got=release,
            expected=fitting,
            command=(
                f"{command}; or look up its aws-neuronx-dkms in {images.look_up}, and add the release to {TABLE} if "
                f"the images accept that driver"
            ),
        )
    ]


def _describe_absent(account: Account, images: MachineImages, release: str, variable: str) -> Look:
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


def _any_page() -> str:
    return next(iter(read_eks_machine_images().values())).look_up
