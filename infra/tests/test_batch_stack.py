"""The commands with STACK=batch, before anything of it is made."""

from __future__ import annotations

import pytest

from infra.apply.terraform import STACK
from infra.tests.conftest import REGION, RunInfra

BATCH = STACK.parent / "batch"
GIVEN = BATCH / "tests/configs/given.txt"


def test_batch_itself_costs_nothing_and_what_is_there_already_is_not_paid_for_again(
    run_infra: RunInfra, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("STACK", "batch"), ("TF_VAR_region", REGION), ("TF_VAR_zone_id", "usw2-az4")):
        monkeypatch.setenv(name, value)

    done = run_infra("cost")

    assert "EKS control plane" not in done.stdout
    assert "core" not in done.stdout
    made = ("1 x NAT gateway", "FSx for Lustre, 1,200 GiB", "4 x trn1.32xlarge (trainium)")
    assert all(line in done.stdout for line in made)

    monkeypatch.setenv("TF_VAR_config", str(GIVEN))

    done = run_infra("cost")

    assert [line in done.stdout for line in made] == [False, False, True]


def test_both_stacks_have_one_file_of_common_variables() -> None:
    """`terraform test` checks their refusals in the EKS stack only."""
    for name in ("common.tf", "versions.tf"):
        assert (BATCH / name).samefile(STACK / name)
