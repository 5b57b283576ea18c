"""Plans, applies and destroys a Terraform stack, and reads its outputs, with the user's own terraform."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.child_process import find_program, read_output, run_to_its_end
from services.common.errors import DeviceError, RecipeError

STACK = Path(__file__).parents[1] / "stacks/eks"
PLAN = ".terraform/millrace.tfplan"  # in a folder that git ignores, because a plan may contain secrets
DATA = ("aws_s3_bucket", "aws_fsx_lustre_file_system", "aws_ecr_repository", "aws_kms_key")


@dataclass(frozen=True)
class Change:
    """A resource that a plan changes."""

    address: str
    actions: tuple[str, ...]
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    """Without the values that are not known before the apply."""

    @property
    def is_loss(self) -> bool:
        return "delete" in self.actions

    @property
    def is_loss_of_data(self) -> bool:
        """Whether the change destroys data. Everything else can be made again."""
        return self.is_loss and type_of(self.address) in DATA


@dataclass(frozen=True)
class Plan:
    """A plan, as `terraform show -json` prints it."""

    changes: tuple[Change, ...]
    is_applyable: bool
    """Whether a resource or an output changes."""


class Stack:
    """A root module and its state. The user's values are in its `terraform.tfvars`, or in the file that VARS names."""

    def __init__(self, folder: Path = STACK, variables: Path | None = None) -> None:
        self._folder = folder
        self._variables = [f"-var-file={variables.resolve()}"] if variables else []

    def init(self) -> None:
        """Initialises the folder, with the providers in TF_PLUGIN_MIRROR if that is set."""
        mirror = os.environ.get("TF_PLUGIN_MIRROR", "")
        if mirror and not Path(mirror).is_dir():
            raise RecipeError(f"TF_PLUGIN_MIRROR={mirror}: no such folder; make one with `terraform providers mirror`")
        plugins = [f"-plugin-dir={Path(mirror).resolve()}"] if mirror else []
        self._run(["init", "-input=false", *plugins], "was not initialised")

    def plan(self, *options: str, is_quiet: bool = False) -> Plan:
        """Makes the plan that `apply` carries out. Unless `is_quiet`, terraform prints the whole plan."""
        command = ["plan", "-input=false", f"-out={PLAN}", *self._variables, *options]
        if is_quiet:
            self._read(*command)
        else:
            self._run(command, "was not planned")
        return read_plan(json.loads(self._read("show", "-json", PLAN)))

    def apply(self) -> None:
        """Carries out the plan and deletes it."""
        self._run(["apply", "-input=false", PLAN], "may be applied in part: terraform's state lists what exists")
        (self._folder / PLAN).unlink(missing_ok=True)

    def destroy(self, *options: str) -> None:
        command = ["destroy", "-input=false", "-auto-approve", *self._variables, *options]
        self._run(command, "may be destroyed in part: terraform's state lists what is left")

    def outputs(self) -> dict[str, Any]:
        """Values of the outputs; empty if nothing is applied."""
        return {name: output["value"] for name, output in json.loads(self._read("output", "-json")).items()}

    def resources(self) -> list[str]:
        """Addresses of the resources in terraform's state, without data sources; empty if there is no state yet.

        Raises `DeviceError` if the state cannot be read, because that is not the same as an empty one.
        """
        shown = json.loads(self._read("show", "-json")).get("values", {})
        return sorted(_list_addresses(shown.get("root_module", {})))

    def _run(self, arguments: list[str], outcome: str) -> None:
        command, *options = arguments
        colour = [] if sys.stdout.isatty() else ["-no-color"]
        exit_code = run_to_its_end([find_program("terraform"), f"-chdir={self._folder}", command, *colour, *options])
        if exit_code:
            raise DeviceError(
                f"terraform {arguments[0]} ended with {exit_code}; its output is above. {self._folder} {outcome}. Run "
                f"the same command again to continue"
            )

    def _read(self, *arguments: str) -> str:
        return read_output("terraform", f"-chdir={self._folder}", *arguments)


def _list_addresses(module: dict[str, Any]) -> Iterator[str]:
    yield from (each["address"] for each in module.get("resources", []) if each["mode"] == "managed")
    for child in module.get("child_modules", []):
        yield from _list_addresses(child)


def type_of(address: str) -> str:
    """The resource type in an address: `aws_s3_bucket` in `module.storage[0].aws_s3_bucket.this["a"]`."""
    return without_indices(address).split(".")[-2]


def without_indices(address: str) -> str:
    """Removes all indices: `module.storage[0].aws_s3_bucket.this["a"]` becomes `module.storage.aws_s3_bucket.this`."""
    return re.sub(r"\[[^]]*]", "", address)


def read_plan(shown: dict[str, Any]) -> Plan:
    """Reads the JSON of `terraform show`."""
    changes = [
        Change(each["address"], tuple(change["actions"]), change.get("before") or {}, change.get("after") or {})
        for each in shown.get("resource_changes", [])
        if each["mode"] == "managed" and (change := each["change"])["actions"] != ["no-op"]
    ]
    return Plan(tuple(changes), shown.get("applyable", False))


def describe_plan(plan: Plan) -> str:
    """Counts the resources that are made, changed, replaced and destroyed, and names those of the last two kinds."""
    made = sum(each.actions == ("create",) for each in plan.changes)
    changed = sum(each.actions == ("update",) for each in plan.changes)
    gone = [each.address for each in plan.changes if each.actions == ("delete",)]
    replaced = [each.address for each in plan.changes if each.is_loss and each.address not in gone]
    lines = [f"terraform would create {made}, change {changed}, replace {len(replaced)} and destroy {len(gone)}"]
    lines += [f"  replace {address}" for address in replaced] + [f"  destroy {address}" for address in gone]
    return "\n".join(lines)
