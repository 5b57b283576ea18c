"""The values of a stack's variables that the commands need. Terraform alone reads the others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from infra.apply.terraform import STACK
from services.common.errors import RecipeError
from services.common.hardware.instance_types import LustreSize, default_lustre_size

# Addresses, domains, accounts and ids that are reserved for documentation, as the examples of `terraform.tfvars` have
# them where a value has to be one's own.
PLACEHOLDER = re.compile(
    r'"(?:203\.0\.113\.|/home/you/)[^"]*"|"[^"]*(?:@example\.com|:111122223333:|-0123456789abcdef0)[^"]*"'
)
ENDPOINTS = 10  # interface endpoints of modules/network, in one zone; a test counts them


class Pool(BaseModel):
    shape: str
    max_nodes: int


class CoreNodes(BaseModel):
    shape: str
    nodes: int


class Capacity(BaseModel):
    kind: Literal["on_demand", "reservation", "capacity_block"] = "on_demand"
    reservation_id: str = ""
    ends_at: str = ""
    """RFC 3339; empty if the capacity does not end."""


class FileSystem(BaseModel):
    gib: int | None = None
    throughput: int | None = None
    """MB/s per TiB."""


class Budget(BaseModel):
    monthly_dollars: float | None = None


class Inputs(BaseModel):
    """Fields have the names of the variables, which `variables.tf` and `common.tf` describe."""

    region: str = ""
    name: str = "millrace"
    zone_id: str = ""
    trainium: Pool
    cpu_nodes: Pool
    core_nodes: CoreNodes | None = None
    """None on AWS Batch."""
    kubernetes_version: str = ""
    """Empty on AWS Batch, and for a root module that chooses it differently."""
    kubernetes_support: str = ""
    ami_release: str = ""
    ami_id: str = ""
    capacity: Capacity = Capacity()
    fsx: FileSystem = FileSystem()
    enable_fsx: bool = True
    budget: Budget = Budget()
    enable_interface_endpoints: bool = False
    given: dict[str, str] = {}
    """Values of the config.txt that names existing resources. Terraform checks them, nothing here does."""

    @property
    def has_cluster(self) -> bool:
        """Whether the stack makes an EKS cluster; else it uses AWS Batch."""
        return self.core_nodes is not None

    @property
    def subnet_id(self) -> str:
        """An existing subnet; empty if the stack makes the network, with its NAT gateway."""
        return self.given.get("SUBNET", "")

    @property
    def lustre_size(self) -> LustreSize | None:
        """Size of the file system that the stack makes; None if it makes none."""
        if not self.enable_fsx or "FSX_DNS_NAME" in self.given:
            return None
        default = default_lustre_size()
        throughput = self.fsx.throughput or default.megabytes_per_second_per_tib
        return LustreSize(self.fsx.gib or default.gib, throughput)


def read_inputs(variables: Mapping[str, Any], needs_place: bool = True, folder: Path = STACK) -> Inputs:
    """Picks what the commands need. With `needs_place` raises `RecipeError` if no region or zone is chosen yet."""
    lacking = [name for name in ("region", "zone_id") if not variables.get(name)]
    if lacking and needs_place:
        raise RecipeError(
            f"{' and '.join(lacking)}: no value. Write it into {folder}/terraform.tfvars, or name a file with VARS=; "
            f"terraform.tfvars.example there is an example"
        )
    values = {name: value for name, value in variables.items() if value is not None}
    try:
        return Inputs(**values | {"given": _read_given(values.get("config"), folder)})
    except ValidationError as error:
        places = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
        raise RecipeError(f"{places}: no value in {folder}, and the stack declares no default for it") from None


def require_own_values(variables: Mapping[str, Any]) -> None:
    """Raises `RecipeError` for values that still are those of `terraform.tfvars.example`."""
    if found := sorted(set(PLACEHOLDER.findall(json.dumps(variables)))):
        raise RecipeError(
            f"{', '.join(found)}: still as in terraform.tfvars.example. Write values of your own (`curl "
            f"https://checkip.amazonaws.com` prints your address), or remove them"
        )


def _read_given(config: str | None, folder: Path) -> dict[str, str]:
    path = folder / config if config else None
    if not path or not path.is_file():
        return {}
    pairs = [line.partition("=") for line in path.read_text(encoding="utf-8").splitlines()]
    return {key: value.strip() for key, _, value in pairs if value.strip() and not key.startswith("#")}
