"""Reads the values of a stack's variables, from the user's files and the variables' defaults or from a plan."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hcl2
from lark.exceptions import LarkError

from infra.apply.terraform import STACK
from infra.aws_releases import read_standard_support_end
from infra.cost.estimate import ControlPlane, Sizes
from infra.shapes import find_shape
from services.common.errors import RecipeError
from services.common.hardware.instance_types import LustreSize, default_lustre_size

REPOSITORIES = "millrace"  # as in infra/stacks/common.tf; a contract test compares them
VARIABLES_FILE = "terraform.tfvars"  # terraform reads it without being asked to
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


def read_variables(given: Path | None, folder: Path = STACK) -> dict[str, Any]:
    """Values from the defaults, TF_VAR_, `terraform.tfvars` and the given file, the last one wins, as in terraform.

    Raises `RecipeError` for a file that is no HCL, and for a variable or attribute that the stack does not declare.
    """
    declared = _read_declarations(folder)
    values: dict[str, Any] = {}
    for name, variable in declared.items():
        if "default" in variable:
            values[name] = variable["default"]
        if f"TF_VAR_{name}" in os.environ:
            values[name] = _environment_value(os.environ[f"TF_VAR_{name}"])
    for path in _list_files(given, folder):
        loaded = _load(path)
        _require_declared(path, loaded, declared, folder)
        values |= loaded
    return complete_variables(values, folder)


def complete_variables(values: Mapping[str, Any], folder: Path = STACK) -> dict[str, Any]:
    """Adds the attributes that `optional` gives an object, because a plan shows variables without them."""
    types = {name: str(variable.get("type", "")) for name, variable in _read_declarations(folder).items()}
    return {
        name: _optional_attributes(types.get(name, "")) | value if isinstance(value, dict) else value
        for name, value in values.items()
    }


def read_inputs(variables: Mapping[str, Any], needs_place: bool = True, folder: Path = STACK) -> Inputs:
    """Picks what the commands need. With `needs_place` raises `RecipeError` if no region or zone is chosen yet."""
    lacking = [name for name in ("region", "zone_id") if not variables.get(name)]
    if lacking and needs_place:
        raise RecipeError(
            f"{' and '.join(lacking)}: no value. Write it into {folder}/{VARIABLES_FILE}, or name a file with VARS=; "
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


def sizes_of(inputs: Inputs, trainium_nodes: int, cpu_nodes: int) -> Sizes:
    return Sizes(
        region=inputs.region or None,
        trainium_shape=find_shape(inputs.trainium_shape).name,
        trainium_nodes=trainium_nodes,
        capacity_kind=inputs.capacity_kind,
        # Only the account knows the reservation's size.
        reserved_nodes=inputs.trainium_max_nodes if inputs.capacity_kind == "reservation" else 0,
        cpu_shape=inputs.cpu_shape,
        cpu_nodes=cpu_nodes,
        control_plane=_control_plane_of(inputs) if inputs.has_cluster else None,
        core_shape=inputs.core_shape,
        core_nodes=inputs.core_nodes,
        nat_gateways=int(not inputs.subnet_id),
        interface_endpoints=inputs.interface_endpoints,
        fsx=inputs.fsx,
    )


def _control_plane_of(inputs: Inputs) -> ControlPlane:
    ends = read_standard_support_end(inputs.kubernetes_version)
    return ControlPlane(inputs.kubernetes_version, inputs.kubernetes_support, ends)


def _attribute(variables: Mapping[str, Any], name: str, attribute: str) -> Any:
    value = (variables.get(name) or {}).get(attribute)
    if value is None:
        raise RecipeError(f"{name}.{attribute}: no value, and the stack declares no default for it")
    return value


def _read_declarations(folder: Path) -> dict[str, dict[str, Any]]:
    """Type and default of every variable that the root module declares, in whichever of its files."""
    files = (path for path in sorted(folder.glob("*.tf")) if b'variable "' in path.read_bytes())
    return {
        plain(name): {key: plain(variable[key]) for key in ("type", "default") if key in variable}
        for path in files
        for block in _parse(path).get("variable", [])
        for name, variable in block.items()
    }


def _list_files(given: Path | None, folder: Path) -> list[Path]:
    """Existing files of values, in terraform's order. Raises `RecipeError` if the given one does not exist."""
    if given and not given.is_file():
        raise RecipeError(f"VARS={given}: no such file; expected a .tfvars file for the stack {folder}")
    files = [folder / VARIABLES_FILE, *sorted(folder.glob("*.auto.tfvars")), *([given] if given else [])]
    return [path for path in files if path.is_file()]


def _require_declared(
    path: Path, values: Mapping[str, Any], declared: Mapping[str, dict[str, Any]], folder: Path
) -> None:
    """Refuses misspelt names: of a variable terraform only warns, and of an object's attribute it says nothing."""
    for name, value in values.items():
        if name not in declared:
            raise RecipeError(_describe_unknown(path, name, declared, f"variable of the stack {folder}"))
        attributes = _attributes_of(str(declared[name].get("type", "")))
        for attribute in value if attributes and isinstance(value, dict) else ():
            if attribute not in attributes:
                raise RecipeError(_describe_unknown(path, f"{name}.{attribute}", attributes, f"attribute of {name}"))


def _describe_unknown(path: Path, name: str, known: Iterable[str], kind: str) -> str:
    last, names = name.rpartition(".")[2], sorted(known)
    near = difflib.get_close_matches(last, names, n=1)
    nearest = f" Did you mean {near[0]}?" if near else ""
    return f"{path}: {name} is no {kind}.{nearest} Expected one of {', '.join(names)}"


def _attributes_of(type_expression: str) -> list[str]:
    """Names of an object's attributes; empty for any other type."""
    is_object = type_expression.removeprefix("${").startswith("object(")
    return re.findall(r"(\w+)\"?\s*[=:]\s*", type_expression) if is_object else []


def _optional_attributes(type_expression: str) -> dict[str, Any]:
    """The literal defaults in an object's type, such as `optional(number, 4)`."""
    found = re.findall(r"(\w+)\s*=\s*optional\(\w+,\s*([^(){}\[\]]+?)\)", type_expression)
    return {name: json.loads(literal) for name, literal in found}


def _load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = plain(_parse(path))
    return values


def _parse(path: Path) -> dict[str, Any]:
    try:
        return _parse_text(path.read_text(encoding="utf-8"))
    except LarkError as error:
        raise RecipeError(f"{path} is no valid HCL: {error}. terraform fmt {path} shows the place") from error


@functools.lru_cache(maxsize=32)  # a stack's variables take 0.3 s of CPU to parse, and a command reads them twice
def _parse_text(text: str) -> dict[str, Any]:
    """Parse HCL. Callers share the result, and must not change it."""
    parsed: dict[str, Any] = hcl2.loads(text)
    return parsed


def plain(value: Any) -> Any:
    """The value that HCL means: hcl2 leaves the quotes on strings and adds entries of its own."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items() if not str(key).startswith("__")}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return json.loads(value)
    return None if value == "null" else value


def _environment_value(text: str) -> Any:
    """The value of an environment variable: HCL for lists, objects and booleans, otherwise the text itself."""
    return plain(hcl2.loads(f"value = {text}"))["value"] if text[:1] in "[{" or text in ("true", "false") else text
