"""What a user chose: the stack's variables, from their file and the defaults of `variables.tf`, or from a plan."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hcl2
from lark.exceptions import LarkError

from infra.apply.terraform import STACK
from infra.cost.estimate import Sizes
from infra.shapes import find_shape
from services.common.errors import RecipeError
from services.common.hardware.lustre import LustreSize, default_lustre_size
from services.common.input.files import read_file

REPOSITORIES = "millrace"  # of both stacks; the contract test holds it to theirs
VARIABLES_FILE = "terraform.tfvars"  # terraform reads it by itself
ENDPOINTS = 10  # of modules/network, in one zone; a test counts them


@dataclass(frozen=True)
class Inputs:
    """Those variables that the commands need; the rest is terraform's alone."""

    region: str
    name: str
    zone_id: str
    """Of the Trainium nodes."""
    trainium_shape: str
    trainium_max_nodes: int
    cpu_shape: str
    cpu_max_nodes: int
    has_cluster: bool
    """An EKS cluster, with core nodes; else the nodes are AWS Batch's."""
    kubernetes_version: str
    """Minor version of the cluster, such as 1.34; empty without one."""
    kubernetes_support: str
    """STANDARD or EXTENDED, as EKS' upgrade policy has it; empty without a cluster."""
    addon_versions: dict[str, str]
    """Pins of EKS' add-ons."""
    ami_release: str
    """Release of EKS' machine image with Neuron; empty: the default of `aws_releases.json`."""
    ami_id: str
    """Machine image of Batch's Trainium nodes; empty: the default of `aws_releases.json`."""
    core_shape: str
    core_nodes: int
    subnet_id: str
    """Subnet that is given; empty: the stack makes the network, with its NAT gateway."""
    capacity_kind: str
    """on_demand, reservation or capacity_block."""
    reservation_id: str
    """Empty on demand."""
    capacity_ends_at: str
    """RFC 3339; empty: it has no end."""
    fsx: LustreSize | None
    """Size of the file system that the stack makes; None where it makes none."""
    budget_monthly_dollars: float | None
    """None: there is no budget."""
    interface_endpoints: int
    """How many there are, in one zone."""
    repositories: str
    """What is before a stage in the name of its repository."""
    registry_id: str
    """Account of a registry that is given; empty: the stack makes the repositories."""


def read_variables(given: Path | None, folder: Path = STACK) -> dict[str, Any]:
    """Defaults, `terraform.tfvars`, TF_VAR_ and the given file, each on top of the one before, as terraform takes them.

    Raises `RecipeError` for a file that is no HCL.
    """
    values: dict[str, Any] = {}
    for name, variable in _read_declarations(folder).items():
        if "default" in variable:
            values[name] = variable["default"]
        if f"TF_VAR_{name}" in os.environ:
            values[name] = _environment_value(os.environ[f"TF_VAR_{name}"])
    for path in (folder / VARIABLES_FILE, *sorted(folder.glob("*.auto.tfvars")), given):
        if path and path.is_file():
            values |= _load(path)
        elif path and path == given:
            raise RecipeError(f"VARS={path}: no such file; it is a .tfvars with values for {folder}/variables.tf")
    return complete_variables(values, folder)


def complete_variables(values: Mapping[str, Any], folder: Path = STACK) -> dict[str, Any]:
    """With the attributes that `optional` gives an object; a plan shows variables without them."""
    types = {name: str(each.get("type", "")) for name, each in _read_declarations(folder).items()}
    return {
        name: _optional_attributes(types.get(name, "")) | value if isinstance(value, dict) else value
        for name, value in values.items()
    }


def read_inputs(variables: Mapping[str, Any], needs_place: bool = True, folder: Path = STACK) -> Inputs:
    """Raises `RecipeError` that names what is not chosen yet; without `needs_place`, region and zone may be empty."""
    lacking = [name for name in ("region", "zone_id") if not variables.get(name)]
    if lacking and needs_place:
        raise RecipeError(
            f"{' and '.join(lacking)} not chosen: write it into {folder}/{VARIABLES_FILE}, or name a file with VARS=. "
            f"infra/README.md has an example"
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
    """The size of the file system as both stacks complete it."""
    default = default_lustre_size()
    return LustreSize(
        gib=int(chosen.get("gib") or default.gib),
        megabytes_per_second_per_tib=int(chosen.get("throughput") or default.megabytes_per_second_per_tib),
    )


def _read_given(config: str | None, folder: Path) -> dict[str, str]:
    """Values of the config.txt that names what is there already; terraform says what is wrong with one."""
    path = folder / config if config else None
    if not path or not path.is_file():
        return {}
    pairs = [line.partition("=") for line in read_file(path).decode().splitlines()]
    return {key: value.strip() for key, _, value in pairs if value.strip() and not key.startswith("#")}


def sizes_of(inputs: Inputs, trainium_nodes: int, cpu_nodes: int) -> Sizes:
    return Sizes(
        region=inputs.region or None,
        trainium_shape=find_shape(inputs.trainium_shape).name,
        trainium_nodes=trainium_nodes,
        capacity_kind=inputs.capacity_kind,
        # How many are reserved, the account alone knows.
        reserved_nodes=inputs.trainium_max_nodes if inputs.capacity_kind == "reservation" else 0,
        cpu_shape=inputs.cpu_shape,
        cpu_nodes=cpu_nodes,
        control_planes=int(inputs.has_cluster),
        core_shape=inputs.core_shape,
        core_nodes=inputs.core_nodes,
        nat_gateways=int(not inputs.subnet_id),
        interface_endpoints=inputs.interface_endpoints,
        fsx=inputs.fsx,
    )


def _attribute(variables: Mapping[str, Any], name: str, attribute: str) -> Any:
    value = (variables.get(name) or {}).get(attribute)
    if value is None:
        raise RecipeError(f"{name}.{attribute} is not chosen, and {STACK}/variables.tf has no default for it")
    return value


def _read_declarations(folder: Path) -> dict[str, dict[str, Any]]:
    """Type and default of every variable that the root module declares, in whichever of its files."""
    files = (path for path in sorted(folder.glob("*.tf")) if b'variable "' in read_file(path))
    return {
        _plain(name): {key: _plain(variable[key]) for key in ("type", "default") if key in variable}
        for path in files
        for block in _parse(path).get("variable", [])
        for name, variable in block.items()
    }


def _optional_attributes(type_expression: str) -> dict[str, Any]:
    """Defaults inside of an object's type, `optional(number, 4)`; those that are literals."""
    found = re.findall(r"(\w+)\s*=\s*optional\(\w+,\s*([^(){}\[\]]+?)\)", type_expression)
    return {name: json.loads(literal) for name, literal in found}


def _load(path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(_parse(path))
    return plain


def _parse(path: Path) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = hcl2.loads(read_file(path).decode())
    except LarkError as error:
        raise RecipeError(f"{path} cannot be read: {error}. terraform fmt {path} says where") from error
    return parsed


def _plain(value: Any) -> Any:
    """As HCL means it: the parser leaves the quotes on texts, and adds entries of its own."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items() if not str(key).startswith("__")}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return json.loads(value)
    return None if value == "null" else value


def _environment_value(text: str) -> Any:
    """A text as it is, anything else as the HCL that it is."""
    return _plain(hcl2.loads(f"value = {text}"))["value"] if text[:1] in "[{" or text in ("true", "false") else text
