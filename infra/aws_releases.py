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
from typing import Any

AWS_RELEASES_JSON = Path(__file__).parent / "aws_releases.json"
ECS = ""


@dataclass(frozen=True)
class MachineImages:
    """Releases of one machine image whose Neuron drivers the stages' images accept."""

    default: str
    """The release that nodes start from if nobody chooses one."""
    drivers: dict[str, str]
    """Version of aws-neuronx-dkms by release: 1.34.7-20260505 of EKS, or the name of ECS' image."""
    look_up: str
    """The page that lists the drivers of further releases."""


def read_machine_images() -> dict[str, MachineImages]:
    """Releases of the AL2023 images with Neuron: EKS' by minor version of Kubernetes, and those of `ECS`."""
    eks, ecs = _read()["eks"], _read()["ecs"]
    entries = {version: (entry, eks["look_up"]) for version, entry in eks["versions"].items()}
    entries[ECS] = (ecs, ecs["look_up"])
    return {name: MachineImages(each["default"], each["releases"], page) for name, (each, page) in entries.items()}


def read_standard_support_end(kubernetes_version: str) -> date | None:
    """The day on which EKS ends standard support of a Kubernetes version; None if the table does not list it."""
    entry = _read()["eks"]["versions"].get(kubernetes_version)
    return date.fromisoformat(entry["standard_support_ends"]) if entry else None


@cache
def _read() -> dict[str, Any]:
    return dict(json.loads(AWS_RELEASES_JSON.read_bytes()))
