"""The platform pins of `platforms.toml`: what all images of one variant share."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PLATFORMS = REPOSITORY / "images/platforms.toml"

SERVICES = ("tokenizer", "compiler", "trainer", "head")
STAGES_WITH_PROGRAM = ("compiler", "trainer")
VARIANTS = ("cpu", "cuda", "neuron")


@dataclass(frozen=True)
class DebianBase:
    """A slim Python base that `make base-image` makes where no image registry is reached."""

    suite: str
    python: str
    slim: str


@dataclass(frozen=True)
class CudaNode:
    """Requirements of the cuda variant's images on a node, which no image can bring."""

    driver: str
    """The oldest NVIDIA driver that runs programs of the variant's CUDA; a newer one runs them too."""


@dataclass(frozen=True)
class NeuronNode:
    """Requirements of the neuron variant's images on a node, which no image can bring."""

    instance_families: tuple[str, ...]
    """Families of EC2 instances, such as trn1, whose NeuronCores the variant's images compute on."""
    driver: str
    """aws-neuronx-dkms of the SDK."""
    driver_before: str
    """The first driver that the SDK's runtime is too old for."""
    device_plugin: str
    ami_type: str
    """EKS's name of the AMI family."""

    def takes_driver(self, version: str) -> bool:
        """Do the variant's images run on a node whose aws-neuronx-dkms is of this version?"""
        return version_numbers(self.driver) <= version_numbers(version) < version_numbers(self.driver_before)


NODES: dict[str, type[CudaNode] | type[NeuronNode]] = {"cuda": CudaNode, "neuron": NeuronNode}


@dataclass(frozen=True)
class Platform:
    """One variant's pin. `slim` carries the images without the program, `platform` those with it."""

    variant: str
    python: str
    ray: str
    torch: str
    slim: str
    platform: str
    sdk: str = ""
    """The Neuron SDK that `platform` brings."""
    cuda: str = ""
    """The CUDA that torch's wheel was built with and brings along, where the variant's images compute on GPUs."""
    debian: DebianBase | None = None
    node: CudaNode | NeuronNode | None = None

    @property
    def word(self) -> str:
        """The pin in one word: images with different words never meet in one Ray cluster."""
        return f"{self.variant}-python{self.python}-ray{self.ray}"

    @property
    def has_one_base(self) -> bool:
        """Do the images with the program stand on the same base as those without it?"""
        return self.platform == self.slim

    def base_of(self, service: str) -> str:
        return self.platform if service in STAGES_WITH_PROGRAM else self.slim

    def on_debian(self) -> Platform:
        """The same variant on the base of `make base-image`, at Debian's Python."""
        assert self.debian
        return replace(self, python=self.debian.python, slim=self.debian.slim, platform=self.debian.slim)


def read_platforms(path: Path = PLATFORMS) -> dict[str, Platform]:
    """Every variant's pin by the variant's name."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {variant: _platform(variant, tables[variant]) for variant in VARIANTS}


def explain_no_image(instance_type: str, path: Path = PLATFORMS) -> str:
    """Why a type with NeuronCores has no image that computes on it; empty where a variant's images do."""
    nodes = {variant: each.node for variant, each in read_platforms(path).items()}
    families = {variant: node.instance_families for variant, node in nodes.items() if isinstance(node, NeuronNode)}
    if any(instance_type.partition(".")[0] in each for each in families.values()):
        return ""
    known = "; ".join(f"those of {variant} do on {' and '.join(each)}" for variant, each in families.items())
    return (
        f"no image computes on {instance_type} yet: {known} (instance_families in images/platforms.toml). Its nodes "
        f"would be paid for and end every stage with exit code 4"
    )


def read_digests(path: Path = PLATFORMS) -> dict[str, str]:
    """Image tag to the digest that `make pin` resolved for it."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["digests"])


def _platform(variant: str, table: dict[str, Any]) -> Platform:
    debian, node = table.pop("debian", None), table.pop("node", None)
    return Platform(
        variant=variant,
        **table,
        debian=DebianBase(**debian) if debian else None,
        node=_node(variant, node) if node else None,
    )


def _node(variant: str, table: dict[str, Any]) -> CudaNode | NeuronNode:
    lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return NODES[variant](**table | lists)


def version_numbers(version: str) -> tuple[int, ...]:
    """Numbers by which versions such as 2.27.4.0 are in order."""
    return tuple(int(part) for part in version.split("."))
