"""The table of shapes says what EC2 said, as moto ships it; the table of AWS' releases holds what the images take."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any, Literal

import moto.ec2
import pytest

from images.platforms import find_variant, read_neuron_nodes
from infra.aws_releases import read_machine_images
from infra.shapes import SHAPES_JSON, find_shape, read_shapes
from services.common.errors import RecipeError
from services.common.hardware.gpus import sum_peaks
from services.common.hardware.instance_types import TERA

CAPTURE = Path(moto.ec2.__file__).parent / "resources"
MIB_PER_GIB = 1024
SHAPES = json.loads(SHAPES_JSON.read_text(encoding="utf-8"))["shapes"]
Zones = dict[str, dict[str, list[str]]]
# EC2 says 512 GiB of one Trainium2 and nothing of those of trn2u, Neuron's "Amazon EC2 Trn2 Architecture" 96 of both.
AS_NEURON_SAYS = {
    "trn2.48xlarge": {"device_memory_gib": 96},
    "trn2u.48xlarge": {"neuron_devices": 16, "neuron_cores": 128, "device_memory_gib": 96},
}
# By the name that EC2 has: its H100 and A100 are those of SXM boards.
NAMES_OF_THE_DRIVER = {"A100": "NVIDIA A100-SXM4-40GB", "H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}


@pytest.fixture(scope="module")
def instance_types() -> dict[str, Any]:
    return _read(CAPTURE / "instance_types.json.gz")


@pytest.fixture(scope="module")
def zones() -> Zones:
    """Zone ids of each instance type by region."""
    found: Zones = {}
    for path in sorted((CAPTURE / "instance_type_offerings/availability-zone-id").iterdir()):
        region = path.name.partition(".")[0]
        for offering in _read(path):
            found.setdefault(offering["InstanceType"], {}).setdefault(region, []).append(offering["Location"])
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_what_ec2_has(instance_types: dict[str, Any], zones: Zones, name: str) -> None:
    """Its zones are those of every region with Trainium."""
    facts, said = SHAPES[name], instance_types[name]
    network, devices = said["NetworkInfo"], said.get("NeuronInfo", {}).get("NeuronDevices", [])
    gpus = said.get("GpuInfo", {}).get("Gpus", [])
    assert {card["MaximumNetworkInterfaces"] for card in network["NetworkCards"]} == {facts["interfaces_per_card"]}
    assert said["ProcessorInfo"]["SupportedArchitectures"] == [facts["architecture"]]
    regions = {region for each in SHAPES if SHAPES[each]["neuron_devices"] for region in zones[each]}
    said_facts = {
        "vcpus": said["VCpuInfo"]["DefaultVCpus"],
        "memory_gib": said["MemoryInfo"]["SizeInMiB"] // MIB_PER_GIB,
        "neuron_devices": sum(each["Count"] for each in devices),
        "neuron_cores": sum(each["Count"] * each["CoreInfo"]["Count"] for each in devices),
        "gpus": sum(each["Count"] for each in gpus),
        "device_memory_gib": sum(each["MemoryInfo"]["SizeInMiB"] for each in (*devices, *gpus)) // MIB_PER_GIB,
        "network_cards": network["MaximumNetworkCards"],
        "efa_cards": network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
        "network_gigabits_per_second": sum(card["PeakBandwidthInGbps"] for card in network["NetworkCards"]),
        "nvme_gb": said.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
        "supports_capacity_block": "capacity-block" in said["SupportedUsageClasses"],
        "supports_placement_group": "cluster" in said["PlacementGroupInfo"]["SupportedStrategies"],
        "zone_ids": {region: sorted(ids) for region, ids in zones[name].items() if region in regions},
        **AS_NEURON_SAYS.get(name, {}),
    }
    assert {key: facts[key] for key in said_facts} == said_facts


@pytest.mark.parametrize("name", read_shapes())
def test_a_pod_fits_its_node(name: str) -> None:
    shape = find_shape(name)
    if not shape.pod:
        return
    assert shape.pod.cpus < shape.vcpus
    assert shape.pod.memory_gib + shape.pod.huge_pages_gib < shape.memory_gib
    assert shape.pod.shared_memory_gib < shape.pod.memory_gib
    assert shape.huge_pages_gib is not None
    assert shape.pod.huge_pages_gib <= shape.huge_pages_gib
    assert not SHAPES[name]["nvme_gb"] or shape.pod.storage_gib < SHAPES[name]["nvme_gb"]
    assert bool(shape.pod.huge_pages_gib) == bool(shape.efa_cards) == bool(shape.neuron_devices)


@pytest.mark.parametrize("name", [name for name, shape in read_shapes().items() if shape.gpus])
def test_a_type_with_gpus_has_their_peaks_and_no_pod(instance_types: dict[str, Any], name: str) -> None:
    shape, (gpu,) = find_shape(name), instance_types[name]["GpuInfo"]["Gpus"]
    assert SHAPES[name]["peak_bf16_tflops"] * TERA == sum_peaks([NAMES_OF_THE_DRIVER[gpu["Name"]]] * gpu["Count"])
    with pytest.raises(RecipeError, match=name):
        _ = shape.pod_resources


@pytest.mark.parametrize("name", read_shapes())
def test_its_price_is_of_a_region_that_offers_it(name: str) -> None:
    price = find_shape(name).price
    assert price is None or price.region in SHAPES[name]["zone_ids"]


@pytest.mark.parametrize("service", ["eks", "ecs"])
@pytest.mark.parametrize("name", [name for name, shape in read_shapes().items() if shape.neuron_devices])
def test_releases_have_drivers_that_the_images_take_and_the_default_is_the_newest_with_their_own(
    service: Literal["eks", "ecs"], name: str
) -> None:
    images, node = read_machine_images(service, name), read_neuron_nodes()[find_variant(name)]
    assert all(map(node.takes_driver, images.drivers.values()))
    own = [release for release, driver in images.drivers.items() if driver == node.driver]
    assert images.default == max(own, key=lambda release: re.findall(r"\d{8}", release))


def test_images_take_no_driver_that_is_too_old_or_too_new_for_them() -> None:
    node = read_neuron_nodes()["neuron"]
    drivers = ("2.26.10.0", node.driver, "2.28.0.0", "2.29.0.0")
    assert [node.takes_driver(each) for each in drivers] == [False, True, True, False]


def _read(path: Path) -> Any:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)
