"""The FSx for Lustre file system that both stacks make unless a user says otherwise, and how fast it is.

One figure for Terraform, the cost and the trainer's plan: `infra/shapes.json`, which every image has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.common.hardware.instance_types import SHAPES_JSON

_GIB_PER_TIB = 1024
_MEGABYTE = 10**6


@dataclass(frozen=True)
class LustreSize:
    """The size of a file system, from which its speed follows."""

    gib: int
    megabytes_per_second_per_tib: int
    """What AWS calls PerUnitStorageThroughput: 125, 250, 500 or 1000 for PERSISTENT_2."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes that all nodes together write in a second, for as long as they like: the provisioned baseline. Bursts
        beyond it are not counted (FSx for Lustre User Guide, "Performance characteristics of SSD storage classes").
        """
        return self.gib / _GIB_PER_TIB * self.megabytes_per_second_per_tib * _MEGABYTE

    def __str__(self) -> str:
        return f"{self.gib:,} GiB at {self.megabytes_per_second_per_tib:,} MB/s/TiB"


def default_lustre_size() -> LustreSize:
    """The file system of a stack whose `fsx` variable says nothing."""
    return LustreSize(**json.loads(SHAPES_JSON.read_text(encoding="utf-8"))["file_system"])
