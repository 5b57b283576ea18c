"""Reads an overlay's `settings.env`: an AWS account's region, registry and file system, and the nodes of two pools.

`make infra-up` writes the file for the overlay `eks`; k8s/README.md explains its keys.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from deploy.reservation import read_end
from infra.shapes import Shape, find_shape
from services.common.errors import DeviceError, RecipeError

SETTINGS = "settings.env"
TRAINIUM, CPU = "trainium", "cpu"
"""The pools: of nodes with Neuron devices, and of nodes without."""
KEYS = (
    *("REGION", "CLUSTER_NAME", "REGISTRY", "FSX_ID", "FSX_DNS_NAME", "FSX_MOUNT_NAME"),
    *("TRAINIUM_SHAPE", "TRAINIUM_NODE_GROUP", "TRAINIUM_MAX_NODES", "CPU_SHAPE", "CPU_NODE_GROUP", "CPU_MAX_NODES"),
    *("CAPACITY_ENDS_AT", "COMPILER_POOL", "RECIPE"),
)


@dataclass(frozen=True)
class Pool:
    """Nodes of one shape. Each node runs one pod of a stage."""

    name: str
    shape: Shape
    max_nodes: int
    node_group: str
    """`<EKS cluster>/<managed node group>`, which is scaled for a deployment; empty for static nodes."""
    capacity_ends_at: str
    """End of the capacity reservation (RFC 3339); empty where there is none."""


def read_settings(path: Path) -> dict[str, str]:
    """All keys; empty for one that the file does not have. Raises `RecipeError` for an unknown key and for quotes."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    settings = dict.fromkeys(KEYS, "")
    for line in [line for line in lines if line and not line.startswith("#")]:
        key, _, value = line.partition("=")
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            meant = f"do you mean {near[0]}?" if near else f"known keys: {', '.join(KEYS)}"
            raise RecipeError(f"{SETTINGS}: unknown key {key}; {meant}")
        if re.search(r"[\s\"']", value):
            raise RecipeError(f"{SETTINGS}: {line}: expected {key}=VALUE, without quotes, spaces or a comment")
        settings[key] = value
    return settings


def compiler_pool_of(settings: dict[str, str]) -> str:
    """Raises `RecipeError` for a COMPILER_POOL that is no pool."""
    name = settings["COMPILER_POOL"] or CPU
    if name not in (TRAINIUM, CPU):
        raise RecipeError(f"{SETTINGS}: COMPILER_POOL={name}: expected {TRAINIUM} or {CPU} (k8s/README.md)")
    return name


def read_pool(settings: dict[str, str], name: str) -> Pool:
    """Raises `RecipeError` for a setting of the pool that is missing or wrong."""
    prefix = name.upper()
    for key in (f"{prefix}_SHAPE", f"{prefix}_MAX_NODES"):
        if not settings[key]:
            raise RecipeError(f"{SETTINGS} has no {key}: add it; k8s/overlays/eks has an example")
    shape, max_nodes = find_shape(settings[f"{prefix}_SHAPE"]), settings[f"{prefix}_MAX_NODES"]
    if not max_nodes.isdecimal() or not int(max_nodes):
        raise RecipeError(f"{SETTINGS}: {prefix}_MAX_NODES={max_nodes}: expected a whole number from 1 on")
    if bool(shape.neuron_devices) != (name == TRAINIUM) or shape.gpus:
        raise RecipeError(
            f"{SETTINGS}: {prefix}_SHAPE={shape.name} has {shape.neuron_devices} Neuron devices and {shape.gpus} GPUs: "
            f"TRAINIUM_SHAPE must have Neuron devices, and CPU_SHAPE neither. Types with GPUs serve only for plans"
        )
    ends_at = settings["CAPACITY_ENDS_AT"] if name == TRAINIUM else ""
    if ends_at:
        try:
            read_end(ends_at)
        except DeviceError as error:
            raise RecipeError(f"{SETTINGS}: {error}") from error
    cluster, node_group = settings["CLUSTER_NAME"], settings[f"{prefix}_NODE_GROUP"]
    return Pool(name, shape, int(max_nodes), f"{cluster}/{node_group}" if cluster and node_group else "", ends_at)
