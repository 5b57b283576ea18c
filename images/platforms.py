"""Reads `platforms.toml`: the base images, Python, Ray and torch that all images of one variant share."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PLATFORMS = REPOSITORY / "images/platforms.toml"

SERVICES = ("tokenizer", "compiler", "trainer", "head")
STAGES_WITH_PROGRAM = ("compiler", "trainer")
VARIANTS = ("cpu", "cuda", "neuron", "trn2")


@dataclass(frozen=True)
class DebianBase:
    """A slim Python base image, which `make images DEBOOTSTRAP=1` makes without an image registry."""

    suite: str
    python: str
    slim: str


@dataclass(frozen=True)
class NeuronNode:
    """Requirements of a variant with the Neuron SDK on a node, which no image can bring."""

    instance_families: list[str]
    """Families of EC2 instances, such as trn1, whose NeuronCores the variant's images compute on."""
    driver: str
    """aws-neuronx-dkms of the SDK."""
    ami_type: str
    """EKS's name of the AMI family."""
    driver_before: str = ""
    """The first driver that the SDK's runtime is too old for; empty where none is known."""
    device_plugin: str = ""
    """aws-neuronx-k8-plugin of the SDK; empty where no source names it."""

    def takes_driver(self, version: str) -> bool:
        """Return whether the variant's images run on a node with this version of aws-neuronx-dkms."""
        is_old = not self.driver_before or version_numbers(version) < version_numbers(self.driver_before)
        return version_numbers(self.driver) <= version_numbers(version) and is_old

    def describe_drivers(self) -> str:
        """The versions of aws-neuronx-dkms that the variant's images accept, in words."""
        before = f" and before {self.driver_before}" if self.driver_before else ""
        return f"aws-neuronx-dkms from {self.driver} on{before}"


@dataclass(frozen=True)
class Platform:
    """The pins of one variant: the base images and the versions that all its images have."""

    variant: str
    python: str
    ray: str
    torch: str
    slim: str
    """Base image of the tokenizer and the head."""
    platform: str
    """Base image of the services that contain the program: the compiler and the trainer."""
    sdk: str = ""
    """Version of the Neuron SDK in the images; empty unless the variant computes on NeuronCores."""
    cuda: str = ""
    """Version of CUDA that torch's wheel depends on; empty unless the variant computes on NVIDIA GPUs."""
    nvidia_driver: str = ""
    """Version of the oldest NVIDIA driver that runs programs of that CUDA; newer drivers run them too."""
    debian: DebianBase | None = None
    node: NeuronNode | None = None
    """What a node must have besides a Neuron device; only with `sdk`."""

    def base_of(self, service: str) -> str:
        return self.platform if service in STAGES_WITH_PROGRAM else self.slim


def dockerfile_of(service: str) -> str:
    """Path of a service's Dockerfile from the repository's root; services with the program share one."""
    return f"images/{'program' if service in STAGES_WITH_PROGRAM else service}.Dockerfile"


def read_platforms(path: Path = PLATFORMS) -> dict[str, Platform]:
    """The pins of every variant, by the variant's name."""
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    for table in (tables[variant] for variant in VARIANTS):
        table["debian"] = DebianBase(**table["debian"]) if "debian" in table else None
        table["node"] = NeuronNode(**table["node"]) if "node" in table else None
    return {variant: Platform(variant, **tables[variant]) for variant in VARIANTS}


def find_variant(instance_type: str) -> str:
    """Return the variant whose images compute on an instance type with NeuronCores; empty where none does."""
    family = instance_type.partition(".")[0]
    return next((variant for variant, node in read_neuron_nodes().items() if family in node.instance_families), "")


def explain_no_image(instance_type: str) -> str:
    """Return the reason why no image computes on an instance type with NeuronCores; empty where one does."""
    if find_variant(instance_type):
        return ""
    known = "; ".join(
        f"those of {variant} do on {' and '.join(node.instance_families)}"
        for variant, node in read_neuron_nodes().items()
    )
    return (
        f"no image computes on {instance_type} yet: {known} (instance_families in images/platforms.toml). Its nodes "
        f"would be paid for and end every stage with exit code 4"
    )


def read_neuron_nodes() -> dict[str, NeuronNode]:
    """The requirements on a node of every variant that computes on NeuronCores, by the variant's name."""
    return {variant: platform.node for variant, platform in read_platforms().items() if platform.node}


def read_digests(path: Path = PLATFORMS) -> dict[str, str]:
    """The digests that `make refresh-pins WRITE=1` resolved, by the name of the base image."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["digests"])


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as 2.27.4.0, for comparisons."""
    return tuple(int(part) for part in version.split("."))
