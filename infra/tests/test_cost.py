"""The cost is a sum that a person can check, of prices that say where they are from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hcl2
import pytest

from infra.cost import FSX_THROUGHPUTS, require_budget
from infra.inputs import ENDPOINTS, read_inputs, read_variables, sizes_of
from infra.prices import fsx_gb_month, read_prices
from infra.stack import STACK
from services.common.errors import RecipeError
from tests.command import call

STANDING = 0.10 + 2 * 0.4032 + 0.045 + 0.005 + 1200 * 0.210 / 730  # of the defaults, by the hour
WriteValues = Callable[[str], None]


@pytest.fixture
def write_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteValues:
    def write(text: str) -> None:
        path = tmp_path / "mine.tfvars"
        path.write_text(f"{text}\n", encoding="utf-8")
        monkeypatch.setenv("VARS", str(path))

    return write


def test_a_run_costs_what_its_parts_cost(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES", "4")
    monkeypatch.setenv("HOURS", "10")

    done = call(capfd, "infra.__main__", "cost")

    assert done.returncode == 0, done.stderr
    assert f"  ${STANDING:.2f}/hour" in done.stdout
    assert "4 x trn1.32xlarge (trainium)     $86.000/hour  us-east-1, 2026-06" in done.stdout
    assert f"a run of 10 hours: ${(STANDING + 86) * 10:,.2f}" in done.stdout
    assert "List prices: a hint, no bill." in done.stdout
    assert "CloudWatch's Container Insights" in done.stdout.partition("Not in it")[2].partition("\n")[0]
    assert "THE STACK IS IN" not in done.stdout  # nobody has said where


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ('region = "us-west-2"', ["THE STACK IS IN us-west-2, and prices of us-east-1 are not its own"]),
        ('region = "us-east-1"', []),
        (
            'region = "us-east-1"\ntrainium = { shape = "trn2.48xlarge" }',
            ["THE STACK IS IN us-east-1, and prices of us-east-2 are not its own"],
        ),
    ],
)
def test_a_price_of_another_region_is_said_to_be_one(
    capfd: pytest.CaptureFixture[str], write_values: WriteValues, place: str, said: list[str]
) -> None:
    write_values(place)

    done = call(capfd, "infra.__main__", "cost")

    assert [line.partition(":")[0] for line in done.stdout.splitlines() if "THE STACK IS IN" in line] == said


def test_a_capacity_block_is_not_billed_by_the_hour_again(
    capfd: pytest.CaptureFixture[str], write_values: WriteValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_values('capacity = { kind = "capacity_block", reservation_id = "cr-1", ends_at = "2027-01-31T11:30:00Z" }')
    monkeypatch.setenv("HOURS", "10")

    done = call(capfd, "infra.__main__", "cost")

    assert "4 x trn1.32xlarge are a Capacity Block's: paid in full when it was bought" in done.stdout
    assert "trn1.32xlarge (trainium" not in done.stdout
    assert f"a run of 10 hours: ${STANDING * 10:,.2f}" in done.stdout


def test_a_reservation_is_billed_while_nobody_uses_it(
    capfd: pytest.CaptureFixture[str], write_values: WriteValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NODES is what a run takes of it, and max_nodes what is there."""
    write_values('capacity = { kind = "reservation", reservation_id = "cr-1" }')
    monkeypatch.setenv("NODES", "2")
    monkeypatch.setenv("HOURS", "10")

    done = call(capfd, "infra.__main__", "cost")

    standing, _, rest = done.stdout.partition("/month")
    assert "4 x trn1.32xlarge (trainium, reserved)" in standing
    assert f"${STANDING + 86:,.2f}/hour" in standing
    assert "trn1.32xlarge" not in rest.partition("a run of")[0]
    assert f"a run of 10 hours: ${(STANDING + 86) * 10:,.2f}" in rest
    assert "billed until it ends or is cancelled, whether nodes run in it or not" in rest


def test_a_budget_that_is_spent_with_nothing_running_is_refused() -> None:
    sizes = sizes_of(read_inputs(read_variables(None), needs_place=False), trainium_nodes=4, cpu_nodes=0)

    require_budget(sizes, None)
    require_budget(sizes, STANDING * 730 + 1)
    with pytest.raises(RecipeError, match=rf"monthly_dollars = 900, and the stack costs about \${STANDING * 730:.2f}"):
        require_budget(sizes, 900)


@pytest.mark.parametrize(("name", "value"), [("NODES", "many"), ("HOURS", "-1"), ("HOURS", "inf"), ("CPU_NODES", "a")])
def test_a_number_that_is_none_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    done = call(capfd, "infra.__main__", "cost")

    assert done.returncode == 2
    assert f"{name}={value}: expected" in done.stderr


def test_a_users_values_count(capfd: pytest.CaptureFixture[str], write_values: WriteValues) -> None:
    write_values(
        'trainium = { shape = "trn2.48xlarge", max_nodes = 2 }\nfsx = { gib = 4800, throughput = 500 }\n'
        "enable_interface_endpoints = true"
    )

    done = call(capfd, "infra.__main__", "cost")

    assert "2 x trn2.48xlarge (trainium)" in done.stdout
    assert "FSx for Lustre, 4800 GiB of 500 MB/s/TiB" in done.stdout
    assert "10 x interface endpoint" in done.stdout


def test_the_defaults_are_the_stacks() -> None:
    """Read from `variables.tf`, those inside of `optional` too."""
    variables = read_variables(None)

    inputs = read_inputs(variables | {"region": "us-west-2", "zone_id": "usw2-az4"})

    assert (inputs.trainium_shape, inputs.trainium_max_nodes) == ("trn1.32xlarge", 4)
    assert (inputs.core_shape, inputs.core_nodes) == ("m7i.2xlarge", 2)
    assert (inputs.fsx_gib, inputs.fsx_throughput) == (1200, 250)
    assert (inputs.capacity_kind, inputs.reservation_id, inputs.interface_endpoints) == ("on_demand", "", 0)


def test_as_many_endpoints_are_paid_for_as_are_made() -> None:
    network = hcl2.loads((STACK.parents[1] / "modules/network/main.tf").read_text(encoding="utf-8"))
    [of_all] = [block["interface_endpoints"] for block in network["locals"] if "interface_endpoints" in block]
    for stack in ("eks", "batch"):
        main = hcl2.loads((STACK.parent / stack / "main.tf").read_text(encoding="utf-8"))
        [own] = [
            module["endpoints_of_target"]
            for block in main["module"]
            for module in block.values()
            if "endpoints_of_target" in module
        ]
        assert str(of_all).count('"') // 2 + len(own) == ENDPOINTS, stack


def test_every_price_says_where_it_is_from() -> None:
    prices = read_prices()

    assert {fsx_gb_month(each) for each in FSX_THROUGHPUTS} <= prices.keys()
    assert all(price.dollars > 0 and price.source and price.dated for price in prices.values())
