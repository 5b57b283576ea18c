"""Reads the size and speed of the FSx for Lustre file system that both stacks make by default.

Terraform, the cost and the trainer's plan take it from one place: `infra/shapes.json`, which every image has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.common.hardware.instance_types import SHAPES_JSON

_GIB_PER_TIB = 1024
_MEGABYTE = 10**6


@dataclass(frozen=True)
class LustreSize:
    """The size of a file system, which determines its speed."""

    gib: int
    megabytes_per_second_per_tib: int
    """AWS's PerUnitStorageThroughput: 125, 250, 500 or 1000 for PERSISTENT_2."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second that all nodes together can write without a time limit: the provisioned baseline, without
        bursts (FSx for Lustre User Guide, "Performance characteristics of SSD storage classes").
        """
        return self.gib / _GIB_PER_TIB * self.megabytes_per_second_per_tib * _MEGABYTE

    def __str__(self) -> str:
        return f"{self.gib:,} GiB at {self.megabytes_per_second_per_tib:,} MB/s/TiB"


def default_lustre_size() -> LustreSize:
    """Return the size of the file system of a stack without its variable `fsx`."""
    return LustreSize(**json.loads(SHAPES_JSON.read_text(encoding="utf-8"))["file_system"])
