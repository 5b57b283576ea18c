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


def test_the_datapoint_that_the_readme_looks_for_is_the_idle_alarms(guardrails: str) -> None:
    [command] = re.findall(
        r"aws cloudwatch get-metric-statistics(.*?)\n\n", (INFRA / "README.md").read_text(), re.DOTALL
    )
    for option, attribute in (("namespace", "namespace"), ("metric-name", "metric_name"), ("period", "period")):
        [value] = re.findall(rf'^  {attribute} += "?(\w+)"?$', guardrails, re.MULTILINE)
        assert f"--{option} {value} " in command
    assert "dimensions          = { ClusterName = var.name }" in guardrails
    assert "--dimensions Name=ClusterName,Value=millrace " in command
