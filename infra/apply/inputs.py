"""Picks what the commands need of the values of a stack's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.apply.terraform import STACK
from services.common.errors import RecipeError
from services.common.hardware.instance_types import LustreSize, default_lustre_size

REPOSITORIES = "millrace"  # as in infra/stacks/common.tf; a contract test compares them
ENDPOINTS = 10  # interface endpoints of modules/network, in one zone; a test counts them


@dataclass(frozen=True)
class Inputs:
    """Values of the variables that the commands need. Terraform alone reads the others."""

    region: str
    name: str
    zone_id: str
    """Availability zone of the Trainium nodes."""
    trainium_shape: str
    trainium_max_nodes: int
    cpu_shape: str
    cpu_max_nodes: int
    has_cluster: bool
    """True for an EKS cluster, which has core nodes; False for AWS Batch."""
    kubernetes_version: str
    """Minor version of the cluster, such as 1.34; empty without a cluster."""
    kubernetes_support: str
    """EKS' upgrade policy, STANDARD or EXTENDED; empty without a cluster."""
    addon_versions: dict[str, str]
    """Pinned versions of EKS add-ons, by add-on."""
    ami_release: str
    """Release of EKS' machine image with Neuron; empty for the default of `aws_releases.json`."""
    ami_id: str
    """Machine image of Batch's Trainium nodes; empty for the default of `aws_releases.json`."""
    core_shape: str
    core_nodes: int
    subnet_id: str
    """An existing subnet; empty if the stack makes the network, with its NAT gateway."""
    capacity_kind: str
    """on_demand, reservation or capacity_block."""
    reservation_id: str
    """Empty on demand."""
    capacity_ends_at: str
    """RFC 3339; empty if the capacity does not end."""
    fsx: LustreSize | None
    """Size of the file system that the stack makes; None if it makes none."""
    budget_monthly_dollars: float | None
    """Monthly budget of the whole account; None without a budget."""
    interface_endpoints: int
    """Number of interface endpoints, all in one zone."""
    repositories: str
    """Prefix of the stages' names in ECR."""
    registry_id: str
    """Account of an existing registry; empty if the stack makes the repositories."""


def read_inputs(variables: Mapping[str, Any], needs_place: bool = True, folder: Path = STACK) -> Inputs:
    """Picks what the commands need. With `needs_place` raises `RecipeError` if no region or zone is chosen yet."""
    lacking = [name for name in ("region", "zone_id") if not variables.get(name)]
    if lacking and needs_place:
        raise RecipeError(
            f"{' and '.join(lacking)}: no value. Write it into {folder}/terraform.tfvars, or name a file with VARS=; "
            f"terraform.tfvars.example there is an example"
        )
    capacity = variables.get("capacity") or {}
    budget = (variables.get("budget") or {}).get("monthly_dollars")
    endpoints = variables.get("enable_interface_endpoints")
    has_cluster = "core_nodes" in variables
    given = _read_given(variables.get("config"), folder)
    is_fsx_made = variables.get("enable_fsx", True) and "FSX_DNS_NAME" not in given
    return Inputs(
        region=variables.get("region") or "",
        name=variables.get("name", "millrace"),
        zone_id=variables.get("zone_id") or "",
        trainium_shape=_attribute(variables, "trainium", "shape"),
        trainium_max_nodes=int(_attribute(variables, "trainium", "max_nodes")),
        cpu_shape=_attribute(variables, "cpu_nodes", "shape"),
        cpu_max_nodes=int(_attribute(variables, "cpu_nodes", "max_nodes")),
        has_cluster=has_cluster,
        kubernetes_version=variables.get("kubernetes_version") or "",
        kubernetes_support=variables.get("kubernetes_support") or "",
        addon_versions=variables.get("addon_versions") or {},
        ami_release=variables.get("ami_release") or "",
        ami_id=variables.get("ami_id") or "",
        core_shape=_attribute(variables, "core_nodes", "shape") if has_cluster else "",
        core_nodes=int(_attribute(variables, "core_nodes", "nodes")) if has_cluster else 0,
        subnet_id=given.get("SUBNET", ""),
        capacity_kind=capacity.get("kind") or "on_demand",
        reservation_id=capacity.get("reservation_id") or "",
        capacity_ends_at=capacity.get("ends_at") or "",
        fsx=_read_lustre_size(variables.get("fsx") or {}) if is_fsx_made else None,
        budget_monthly_dollars=None if budget is None else float(budget),
        interface_endpoints=ENDPOINTS if endpoints and "SUBNET" not in given else 0,
        repositories=given.get("ECR_REPO", REPOSITORIES).partition("/")[2] or REPOSITORIES,
        registry_id=given.get("ECR_REPO", "").partition(".")[0],
    )


def _read_lustre_size(chosen: Mapping[str, Any]) -> LustreSize:
    """The chosen size, completed by the defaults that both stacks use."""
    default = default_lustre_size()
    return LustreSize(
        gib=int(chosen.get("gib") or default.gib),
        megabytes_per_second_per_tib=int(chosen.get("throughput") or default.megabytes_per_second_per_tib),
    )


def _read_given(config: str | None, folder: Path) -> dict[str, str]:
    """Values of the config.txt that names existing resources. Terraform checks them, nothing here does."""
    path = folder / config if config else None
    if not path or not path.is_file():
        return {}
    pairs = [line.partition("=") for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: value.strip() for key, _, value in pairs if value.strip() and not key.startswith("#")}


def _attribute(variables: Mapping[str, Any], name: str, attribute: str) -> Any:
    value = (variables.get(name) or {}).get(attribute)
    if value is None:
        raise RecipeError(f"{name}.{attribute}: no value, and the stack declares no default for it")
    return value
