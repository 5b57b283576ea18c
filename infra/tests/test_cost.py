"""The cost is a sum that a person can check, of prices that say where they are from."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import hcl2
import pytest

from infra import __main__ as commands
from infra.apply.inputs import ENDPOINTS
from infra.apply.terraform import STACK
from infra.cost.estimate import FSX_THROUGHPUTS, fsx_gb_month, read_prices
from infra.tests.conftest import REGION, RunInfra, WriteValues
from services.common.recipe.file import load_recipe
from services.trainer.inspection.run_plan import Assumptions, describe_plan

STANDING = 0.10 + 2 * 0.4032 + 0.045 + 0.005 + 1200 * 0.600 / 730  # the defaults' price per hour
IN_STANDARD_SUPPORT, END_OF_STANDARD_SUPPORT = date(2027, 3, 26), date(2027, 3, 27)  # of Kubernetes 1.35
ROOT = Path(__file__).parents[2]
BATCH = STACK.parent / "batch"


@pytest.fixture(autouse=True)
def day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_today", lambda: IN_STANDARD_SUPPORT)


def test_a_run_costs_what_its_parts_cost(run_infra: RunInfra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES", "4")
    monkeypatch.setenv("HOURS", "10")

    done = run_infra("cost")

    assert f"  ${STANDING:.2f}/hour" in done.stdout
    assert re.search(r"4 x trn1.32xlarge \(trainium\) +\$86.000/hour  us-east-1, 2026-06", done.stdout)
    assert f"a run of 10 hours: ${(STANDING + 86) * 10:,.2f}" in done.stdout
    [excluded] = [line for line in done.stdout.splitlines() if line.startswith("Not included")]
    assert "Container Insights" in excluded
    assert "logs ($0.500 a GB written, $0.030/GB and month" in excluded
    assert "WARNING" not in done.stdout  # nobody has chosen a region
    monkeypatch.setenv("RECIPE", "recipes/tiny-cpu.toml")
    assert "WARNING" not in run_infra("cost").stdout  # the hours are given


@pytest.mark.parametrize(
    ("recipe", "nodes", "run"),
    [
        ("llama2-7b-trn1", None, (111, 86)),
        ("llama2-7b-trn1", "8", (55.5, 172)),
        ("llama3.1-8b-trn2", "2", (24, 43)),  # another type than the stack's
        ("tiny-cpu", None, (24, 43)),  # two nodes of no type
    ],
)
def test_a_run_takes_the_hours_and_dollars_of_its_plan(
    run_infra: RunInfra, monkeypatch: pytest.MonkeyPatch, recipe: str, nodes: str | None, run: tuple[float, float]
) -> None:
    path = ROOT / "recipes" / f"{recipe}.toml"
    monkeypatch.setenv("RECIPE", str(path))
    if nodes:
        monkeypatch.setenv("NODES", nodes)

    shown = run_infra("cost").stdout

    (hours, hourly), planned = run, describe_plan(load_recipe(path), None, Assumptions())
    scaled = f", if it scales to {nodes} nodes" if nodes and hours != 24 else ""
    assert f"a run of {hours:g} hours: ${(STANDING + hourly) * hours:,.2f}, the stack included{scaled}\n" in shown
    for row in re.findall(r"^  (?:run|cost)  (.* node-hour.*)$", planned, re.MULTILINE):
        assert row in shown
    assert ("WARNING: no hours" in shown) is (hours == 24)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ('region = "us-west-2"', [("us-west-2", "us-east-1")]),
        ('region = "us-east-1"', []),
        ('region = "us-east-1"\ntrainium = { shape = "trn2.48xlarge" }', [("us-east-1", "us-east-2")]),
    ],
)
def test_a_price_of_another_region_is_said_to_be_one(
    run_infra: RunInfra, write_values: WriteValues, values: str, said: list[tuple[str, str]]
) -> None:
    write_values(values)

    done = run_infra("cost")

    assert re.findall(r"^WARNING: the stack is in (\S+), and prices of (\S+) ", done.stdout, re.MULTILINE) == said


def test_the_control_plane_costs_more_once_its_version_leaves_standard_support(
    run_infra: RunInfra, write_values: WriteValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_infra("cost")
    monkeypatch.setattr(commands, "_today", lambda: END_OF_STANDARD_SUPPORT)
    after = run_infra("cost")
    write_values('kubernetes_support = "STANDARD"')
    upgraded = run_infra("cost")

    for done in (before, after):
        [line] = [line for line in done.stdout.splitlines() if "kubernetes_support = EXTENDED" in line]
        assert all(word in line for word in ("Kubernetes 1.35", "2027-03-27", "$0.60", "$0.10", "$365.00 more a month"))
    assert f"  ${STANDING:.2f}/hour" in before.stdout
    assert f"  ${STANDING + 0.50:.2f}/hour" in after.stdout
    assert f"  ${STANDING:.2f}/hour" in upgraded.stdout


@pytest.mark.parametrize(
    ("values", "standing", "hourly", "said"),
    [
        # Nobody guesses the price of a type without a public one.
        (
            'trainium = { shape = "trn2u.48xlarge", max_nodes = 4 }',
            STANDING,
            STANDING,
            "WARNING: no price is known of 4 x trn2u.48xlarge",
        ),
        # Paid for when it was bought.
        (
            'capacity = { kind = "capacity_block", reservation_id = "cr-1", ends_at = "2027-01-31T11:30:00Z" }',
            STANDING,
            STANDING,
            "trn1.32xlarge belong to a Capacity Block",
        ),
        # Billed while nobody uses it: NODES is what a run takes of it, and max_nodes what is there.
        (
            'capacity = { kind = "reservation", reservation_id = "cr-1" }',
            STANDING + 86,
            STANDING + 86,
            "4 x trn1.32xlarge (trainium, reserved)",
        ),
    ],
    ids=["no price", "capacity block", "reservation"],
)
def test_nodes_are_billed_as_they_are_bought(
    run_infra: RunInfra,
    write_values: WriteValues,
    monkeypatch: pytest.MonkeyPatch,
    values: str,
    standing: float,
    hourly: float,
    said: str,
) -> None:
    write_values(values)
    monkeypatch.setenv("NODES", "4")
    monkeypatch.setenv("HOURS", "10")

    done = run_infra("cost")

    assert said in done.stdout
    assert f"${standing:,.2f}/hour" in done.stdout.partition("/month")[0]
    assert f"a run of 10 hours: ${hourly * 10:,.2f}" in done.stdout


@pytest.mark.parametrize(
    ("fsx", "recipe", "said", "enough"),
    [
        ("{ throughput = 250 }", "llama2-7b-trn1", "75 GiB of llama2-7b-trn1, takes 276 s", "throughput = 1000 }"),
        ("{ gib = 2400, throughput = 125 }", "llama2-7b-trn1", "takes 276 s", "gib = 2400, throughput = 500 }"),
        ("{}", "llama2-13b-trn1", "145 GiB of llama2-13b-trn1, takes 133 s", "a larger fsx.gib"),
    ],
)
def test_a_file_system_that_is_too_slow_for_a_checkpoint_in_the_notice_is_said_to_be(
    run_infra: RunInfra,
    write_values: WriteValues,
    monkeypatch: pytest.MonkeyPatch,
    fsx: str,
    recipe: str,
    said: str,
    enough: str,
) -> None:
    write_values(f"fsx = {fsx}")
    monkeypatch.setenv("RECIPE", f"recipes/{recipe}.toml")

    done = run_infra("cost")

    [line] = [line for line in done.stdout.splitlines() if "WARNING: a checkpoint" in line]
    assert said in line
    assert enough in line


# Imports what it is given where no package can be imported but those of the small lock.
LOCKED = """
import importlib, re, sys
from importlib.metadata import packages_distributions
from pathlib import Path
from images.lock import pins_of
pinned = {*pins_of(Path("lockfiles/infra.txt")), "millrace"}
for package, distributions in packages_distributions().items():
    if pinned.isdisjoint(re.sub("[_.]", "-", each.lower()) for each in distributions):
        sys.modules[package] = None  # Python refuses to import it
for module in map(importlib.import_module, sys.argv[1:]):
    if module.__name__ == "infra.__main__":
        module.main(["cost"])
"""


def test_the_commands_need_nothing_but_what_their_small_lock_has() -> None:
    """No torch is waited for before the first price is said; `infra-down` runs the deploy tool in that environment."""
    modules = (
        "infra.__main__",
        "deploy.commands.__main__",
        "k8s.client.__main__",
        "k8s.client.kuberay_target",
        "deploy.batch.batch_target",
    )
    commands = ([sys.executable, "-c", LOCKED, *each] for each in (modules, ("torch",)))

    done, with_torch = (
        subprocess.run(each, capture_output=True, text=True, cwd=ROOT, check=False) for each in commands
    )

    assert done.returncode == 0, done.stderr
    assert "List prices" in done.stdout
    assert "import of torch halted" in with_torch.stderr


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("TF_VAR_regoin=true", r"TF_VAR_regoin is no .*mean region\?"),
        ('regoin = "us-west-2"', r"\.tfvars: regoin is no .*mean region\?"),
        ("trainium = { max_node = 2 }", r"trainium.max_node is .*mean max_nodes\?"),
        ("region = {", "/mine.tfvars:2"),
        *((value, f"{value}: ") for value in ("NODES=many", "HOURS=-1", "HOURS=inf", "CPU_NODES=a")),
    ],
)
def test_a_variable_that_cannot_be_is_refused(
    run_infra: RunInfra, write_values: WriteValues, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    """Terraform warns of an undeclared variable in a file alone, and says nothing of an undeclared attribute."""
    if re.match(r"[A-Z_]+\w+=", value):
        monkeypatch.setenv(*value.split("="))
    else:
        write_values(value)
    assert re.search(said, run_infra("cost", exit_code=2).stderr)


def test_batch_itself_costs_nothing_and_what_is_there_already_is_not_paid_for_again(
    run_infra: RunInfra, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("STACK", "batch"), ("TF_VAR_region", REGION), ("TF_VAR_zone_id", "usw2-az4")):
        monkeypatch.setenv(name, value)
    made = ("1 x NAT gateway", "FSx for Lustre, 1,200 GiB", "4 x trn1.32xlarge (trainium)")

    for given, expected in ((None, [True, True, True]), (BATCH / "tests/configs/given.txt", [False, False, True])):
        if given:
            monkeypatch.setenv("TF_VAR_config", str(given))
        shown = run_infra("cost").stdout
        assert [line in shown for line in made] == expected
        assert not any(line in shown for line in ("EKS control plane", "core"))


def test_both_stacks_have_one_file_of_common_variables() -> None:
    """`terraform test` checks their refusals in the EKS stack only."""
    for name in ("common.tf", "versions.tf"):
        assert (BATCH / name).samefile(STACK / name)


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
