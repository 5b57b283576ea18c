"""Releases of AWS on which the stages' images depend: machine images with a Neuron driver, add-ons and versions of EKS.

`aws_releases.json` is the only table of them, and names its sources. Terraform takes its defaults from it and refuses a
machine image that it does not list. A test checks that every driver in it is one that a variant in
`images/platforms.toml` accepts; `check_machine_image` checks the variant of the chosen instance type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal

AWS_RELEASES_JSON = Path(__file__).parent / "aws_releases.json"


@dataclass(frozen=True)
class MachineImages:
    """Releases of one machine image whose Neuron drivers the stages' images accept on one generation of Trainium."""

    default: str
    """The release that nodes start from if nobody chooses one."""
    drivers: dict[str, str]
    """Version of aws-neuronx-dkms by release: a date such as 20260505 of EKS, or the name of ECS' image."""
    look_up: str
    """The page that lists the drivers of further releases."""


def read_machine_images(service: Literal["eks", "ecs"], instance_type: str) -> MachineImages:
    """Releases of the service's AL2023 image with Neuron for an instance type; none where the table has none."""
    entry, generation = _read()[service], instance_type[:4]
    drivers = entry["releases"].get(generation, {})
    return MachineImages(entry["defaults"].get(generation, ""), drivers, entry["look_up"])


def read_support_ends() -> dict[str, date]:
    """The day on which EKS ends standard support of each Kubernetes version that the table lists."""
    versions = _read()["eks"]["versions"]
    return {version: date.fromisoformat(each["standard_support_ends"]) for version, each in versions.items()}


@cache
def _read() -> dict[str, Any]:
    return dict(json.loads(AWS_RELEASES_JSON.read_bytes()))
