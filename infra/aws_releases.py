"""Releases of AWS on which the stages' images depend: machine images with a Neuron driver, add-ons and versions of EKS.

`aws_releases.json` is the only table of them, and names its sources. Terraform takes its defaults from it and refuses a
machine image that it does not list; `infra-preflight` compares the account with it. A test checks that every driver in
it is one that a variant in `images/platforms.toml` accepts; preflight checks the variant of the chosen instance type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

AWS_RELEASES_JSON = Path(__file__).parent / "aws_releases.json"


@dataclass(frozen=True)
class MachineImages:
    """Releases of one machine image whose Neuron drivers the stages' images accept."""

    default: str
    """The release that nodes start from if nobody chooses one."""
    drivers: dict[str, str]
    """Version of aws-neuronx-dkms by release."""
    look_up: str
    """The page that lists the drivers of further releases."""


def read_eks_machine_images() -> dict[str, MachineImages]:
    """Releases of EKS' AL2023 image with Neuron, such as 1.34.7-20260505, by minor version of Kubernetes."""
    eks = _read()["eks"]
    return {
        version: MachineImages(entry["default"], entry["releases"], eks["look_up"])
        for version, entry in eks["versions"].items()
    }


def read_ecs_machine_images() -> MachineImages:
    """Releases of ECS' AL2023 image with Neuron, by the name of the machine image."""
    ecs = _read()["ecs"]
    return MachineImages(ecs["default"], ecs["releases"], ecs["look_up"])


def read_addon_pins(kubernetes_version: str) -> dict[str, str]:
    """Versions of EKS add-ons for a Kubernetes version, by add-on. Other add-ons are not pinned."""
    return dict(_read()["eks"]["versions"].get(kubernetes_version, {}).get("addons", {}))


def read_standard_support_end(kubernetes_version: str) -> date | None:
    """The day on which EKS ends standard support of a Kubernetes version; None if the table does not list it."""
    entry = _read()["eks"]["versions"].get(kubernetes_version)
    return date.fromisoformat(entry["standard_support_ends"]) if entry else None


def name_of_eks_release(release: str) -> str:
    """Name of the machine image of an EKS release, by which EC2 finds it: EC2 does not know the release's number."""
    version, _, day = release.partition("-")
    return f"amazon-eks-node-al2023-x86_64-neuron-{version.rpartition('.')[0]}-v{day}"


@cache
def _read() -> dict[str, Any]:
    return dict(json.loads(AWS_RELEASES_JSON.read_bytes()))
