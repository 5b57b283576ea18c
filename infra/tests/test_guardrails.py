"""Names in Python code equal those in `modules/guardrails`."""

from __future__ import annotations

import re

import pytest

from infra.apply.terraform import STACK
from infra.teardown.sequence import STOP_POLICY

INFRA = STACK.parents[1]


@pytest.fixture(scope="module")
def guardrails() -> str:
    return (INFRA / "modules/guardrails/main.tf").read_text(encoding="utf-8")


def test_the_policy_that_down_takes_back_is_the_one_that_the_budget_attaches(guardrails: str) -> None:
    name = STOP_POLICY.format(name="${var.name}", region="${var.account.region}")
    assert re.search(rf'^  name +=\s"{re.escape(name)}"$', guardrails, re.MULTILINE)
