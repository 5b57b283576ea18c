"""Roles that a stack makes have the permissions boundary that its user asks for, and the budget's policy its name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import pytest

from infra.apply.terraform import STACK
from infra.teardown.sequence import STOP_POLICY

INFRA = STACK.parents[1]
BOUNDARY = "${var.permissions_boundary}"
MODULES = sorted(INFRA.glob("modules/*"))


def read_blocks(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [block for path in sorted(folder.glob("*.tf")) for block in parse(path).get(kind, [])]


@cache  # the tests ask for blocks of several kinds, and parsing takes most of their time
def parse(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = hcl2.loads(path.read_text(encoding="utf-8"))
    return parsed


def plain(name: str) -> str:
    return name.strip('"')


def roles_of(module: Path) -> dict[str, Any]:
    return {
        plain(name): role
        for block in read_blocks(module, "resource")
        for kind, resources in block.items()
        if plain(kind) == "aws_iam_role"
        for name, role in resources.items()
        if not name.startswith("__")
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_role_of_a_module_is_bounded(module: Path) -> None:
    assert {name: role.get("permissions_boundary") for name, role in roles_of(module).items()} == dict.fromkeys(
        roles_of(module), BOUNDARY
    )


@pytest.mark.parametrize("stack", [INFRA / "stacks/eks", INFRA / "stacks/batch"], ids=lambda stack: stack.name)
def test_a_stack_gives_the_boundary_to_each_module_with_roles(stack: Path) -> None:
    given = {
        (stack / plain(module["source"])).resolve().name: module.get("permissions_boundary")
        for block in read_blocks(stack, "module")
        for name, module in block.items()
        if not name.startswith("__")
    }
    with_roles = {module.name for module in MODULES if roles_of(module)} & given.keys()
    assert with_roles >= {"guardrails", "network"}
    assert {name for name, value in given.items() if value == BOUNDARY} == with_roles


def test_the_policy_that_down_takes_back_is_the_one_that_the_budget_attaches() -> None:
    guardrails = (INFRA / "modules/guardrails/main.tf").read_text(encoding="utf-8")
    name = STOP_POLICY.format(name="${var.name}", region="${var.account.region}")
    assert re.search(rf'^  name +=\s"{re.escape(name)}"$', guardrails, re.MULTILINE)
