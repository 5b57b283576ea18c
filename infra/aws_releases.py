"""What AWS releases and the stages' images stand on: machine images with a Neuron driver, and add-ons of EKS.

`aws_releases.json` is the one table of it: each release of a machine image with its driver, each add-on with its
version, and where that is written. Terraform takes its defaults from there and refuses a machine image that is not in
it; `infra-preflight` holds the account to it. Which drivers the stages' images take is said in `images/platforms.toml`
alone, to which a test holds the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from images.platforms import NeuronNode, read_platforms
from services.common.input.files import read_file

AWS_RELEASES_JSON = Path(__file__).parent / "aws_releases.json"


@dataclass(frozen=True)
class MachineImages:
    """Releases of one machine image, each of which has a driver that the stages' images take."""

    default: str
    """The release of nodes for which nobody chose one."""
    drivers: dict[str, str]
    """Version of aws-neuronx-dkms by release."""
    look_up: str
    """The page that says what further releases have."""


def read_eks_machine_images() -> dict[str, MachineImages]:
    """Releases of EKS' AL2023 with Neuron, such as 1.34.7-20260505, by minor version of Kubernetes."""
    eks = _read()["eks"]
    return {
        version: MachineImages(each["default"], each["releases"], eks["look_up"])
        for version, each in eks["versions"].items()
    }


def read_ecs_machine_images() -> MachineImages:
    """Releases of ECS' AL2023 with Neuron, by the name of the machine image."""
    ecs = _read()["ecs"]
    return MachineImages(ecs["default"], ecs["releases"], ecs["look_up"])


def read_addon_pins(kubernetes_version: str) -> dict[str, str]:
    """Versions of EKS' add-ons that go with a version of Kubernetes, by add-on; of the others none is known."""
    return dict(_read()["eks"]["versions"].get(kubernetes_version, {}).get("addons", {}))


def name_of_eks_release(release: str) -> str:
    """Name of the machine image of a release of EKS' AL2023 with Neuron: EC2 knows none by its number."""
    version, _, date = release.partition("-")
    return f"amazon-eks-node-al2023-x86_64-neuron-{version.rpartition('.')[0]}-v{date}"


def describe_drivers() -> str:
    """Versions of aws-neuronx-dkms that the images take, in words."""
    node = read_platforms()["neuron"].node
    assert isinstance(node, NeuronNode)
    return f"aws-neuronx-dkms from {node.driver} on and before {node.driver_before}"


@cache
def _read() -> dict[str, Any]:
    return dict(json.loads(read_file(AWS_RELEASES_JSON)))
