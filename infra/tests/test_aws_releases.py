"""The table of AWS' releases holds what the stages' images take, and the stacks choose from it."""

from __future__ import annotations

import re

import pytest

from images.platforms import NeuronNode, read_neuron_nodes
from infra.apply.terraform import STACK
from infra.apply.variables import read_variables
from infra.aws_releases import ECS, MachineImages, read_machine_images

TABLES = read_machine_images()


@pytest.fixture(scope="module")
def node() -> NeuronNode:
    return read_neuron_nodes()["neuron"]


@pytest.mark.parametrize(
    ("variant", "taken", "refused"),
    [
        ("neuron", ["2.27.4.0", "2.28.0.0"], ["2.26.10.0", "2.29.0.0", "2.30.2.0"]),
        ("trn2", ["2.31.7.0", "2.40.0.0"], ["2.30.2.0"]),
    ],
)
def test_images_take_their_own_driver_and_those_before_the_first_that_is_too_new(
    variant: str, taken: list[str], refused: list[str]
) -> None:
    """2.29 is the first that neuron's runtime does not take; for trn2 none is known to be too new."""
    node = read_neuron_nodes()[variant]
    assert [driver for driver in [*taken, *refused] if node.takes_driver(driver)] == taken


@pytest.mark.parametrize("images", TABLES.values(), ids=TABLES)
def test_every_release_has_a_driver_that_the_images_of_a_variant_take(images: MachineImages) -> None:
    nodes = read_neuron_nodes().values()
    assert [each for each in images.drivers.values() if not any(node.takes_driver(each) for node in nodes)] == []


@pytest.mark.parametrize("images", TABLES.values(), ids=TABLES)
def test_the_default_is_the_newest_release_with_the_images_own_driver(images: MachineImages, node: NeuronNode) -> None:
    own = [release for release, driver in images.drivers.items() if driver == node.driver]
    assert images.default == max(own, key=lambda release: re.findall(r"\d{8}", release))


@pytest.mark.parametrize("version", sorted(TABLES.keys() - {ECS}))
def test_releases_are_of_their_version_of_kubernetes(version: str) -> None:
    releases = TABLES[version].drivers
    assert all(re.fullmatch(rf"{re.escape(version)}\.\d+-\d{{8}}", release) for release in releases)


def test_the_stack_takes_a_version_that_is_in_the_table() -> None:
    variables = read_variables(None, STACK)
    assert variables["kubernetes_version"] in TABLES
    assert (variables["ami_release"], variables["cpu_ami_release"]) == (None, None)
