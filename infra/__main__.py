"""Makes, prices, checks and takes down the infrastructure: `python -m infra COMMAND`.

The Makefile's targets call it. Each command reads the environment variables that its docstring names.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from images.platforms import SERVICES, find_variant
from images.versions import describe_build
from infra.account.session import Account, explaining_refusals
from infra.addons.installation import compare_releases, install_releases
from infra.addons.releases import Release, choose_releases, read_releases
from infra.apply.inputs import Inputs, complete_variables, read_inputs, read_variables, sizes_of
from infra.apply.overlay_settings import SETTINGS, write_settings
from infra.apply.renewal import judge_renewal, list_renewed_pools
from infra.apply.roads import Place, Target, describe_road, describe_vocabulary
from infra.apply.terraform import STACK, Plan, Stack, describe_plan
from infra.confirmation import require_yes
from infra.cost.estimate import Sizes, describe_cost, require_budget
from infra.preflight.instance_device import judge_device
from infra.preflight.machine_images import judge_machine_image
from infra.preflight.questions import run_preflight
from infra.preflight.requirement import require_fit
from infra.teardown.leftovers import describe_leftovers, find_leftovers
from infra.teardown.sequence import Teardown, Workloads
from infra.workloads.batch_workloads import BatchWorkloads
from infra.workloads.cluster_workloads import ClusterWorkloads
from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import STAGES

HOURS = 24.0
RECIPE = Path(__file__).parents[1] / "recipes/llama2-7b-trn1.toml"
"""The recipe that both targets deploy by default; a test compares it with theirs."""
OVERLAYS = SETTINGS.parents[1]
CONFIG = Path(__file__).parents[1] / "deploy/batch/config.txt"


def main(argv: list[str]) -> int:
    commands = {
        "addons": addons,
        "addons-diff": addons_diff,
        "cost": cost,
        "down": down,
        "leftovers": leftovers,
        "plan": plan,
        "preflight": preflight,
        "up": up,
    }
    parser = argparse.ArgumentParser(prog="python -m infra", description=__doc__)
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args(argv).command]()
    return 0


def addons() -> None:
    """Reads ONLY, names of add-ons separated by commas (all), and DRY_RUN=1, which prints the commands."""
    install_releases(_chosen_releases(), _is_set("DRY_RUN"))


def addons_diff() -> None:
    """Reads ONLY, names of add-ons separated by commas (all)."""
    compare_releases(_chosen_releases())


def cost() -> None:
    """Reads NODES (the stack's maximum), CPU_NODES (0), HOURS (24), RECIPE (Llama 2 7B) and VARS."""
    # People ask for a price before they choose a region.
    print(_describe_cost(_read_inputs(needs_place=False)))


def preflight() -> None:
    """Reads NODES (the stack's maximum), TAG (the working tree's) and VARS."""
    inputs = _read_inputs()
    account = Account(inputs.region)
    findings = run_preflight(account, inputs, _nodes(inputs), _images(inputs), _addresses_per_node)
    require_fit(findings)
    print("all requirements that can be checked from here are met")


def plan() -> None:
    """Reads VARS."""
    _, found, _ = _make_plan(is_quiet=False)
    print(describe_plan(found))


def up() -> None:
    """Reads VARS, NODES and HOURS for the cost, and YES=1."""
    stack, found, inputs = _make_plan(is_quiet=True)
    print(f"\n{describe_plan(found)}; make infra-up DRY_RUN=1 shows the whole plan")
    if lost := [change.address for change in found.changes if change.is_loss_of_data]:
        raise DeviceError(
            f"terraform would destroy {', '.join(lost)} with its data. Nothing was changed. Undo the change of name, "
            f"zone_id, network or fsx that replaces it; to start with empty storage, first make infra-down "
            f"KEEP_DATA=false"
        )
    if renewed := list_renewed_pools(found):
        with explaining_refusals("infra-up, pools in use"):
            require_fit(judge_renewal(Account(inputs.region), inputs, renewed))
    if not found.is_empty:
        require_yes(f"Apply this plan in {inputs.region}?")
        stack.apply()
    if not inputs.has_cluster:
        _write_config(stack, inputs)
        return
    settings, outputs = _settings(), stack.outputs()
    write_settings(outputs, settings)
    print(f"\n{inputs.name} is up in {inputs.region}, with 0 Trainium nodes; its addresses are in {settings}. Next:")
    variant = find_variant(inputs.trainium_shape)
    _print_rest_of_road("eks", Place(inputs.region, inputs.name, outputs["registry"], outputs["bucket"], variant))


def _make_plan(is_quiet: bool) -> tuple[Stack, Plan, Inputs]:
    """Plans the stack and prints its cost.

    Raises `RecipeError` for misspelt variables, of which terraform only warns, and for a budget below the idle stack's
    cost, and `DeviceError` for an instance type on which no image computes, or a machine image whose driver the images
    do not accept.
    """
    _read_variables()
    stack = _stack()
    stack.init()
    found = stack.plan(is_quiet=is_quiet)
    inputs = read_inputs(complete_variables(found.variables, _folder()), folder=_folder())
    print(_describe_cost(inputs))
    require_budget(_sizes(inputs), inputs.budget_monthly_dollars, _today())
    require_fit([*judge_device(inputs), *judge_machine_image(inputs)])
    return stack, found, inputs


def _print_rest_of_road(target: Target, place: Place) -> None:
    print("\n".join(f"  {line}" for line in describe_road(target, place, after="make infra-up")))
    print("If you have the vocabulary's file, no token for a gated one is needed:")
    print("\n".join(f"  {line}" for line in describe_vocabulary(place)))


def _write_config(stack: Stack, inputs: Inputs) -> None:
    """Writes `deploy/batch/config.txt`, or CONFIG=FILE, which deployments on AWS Batch read."""
    path, outputs = _config(), stack.outputs()
    config = str(outputs["config"])
    write_durably(path, config.encode())
    [registry] = re.findall(r"^ECR_REPO=([^/\n]+)", config, re.MULTILINE)
    print(f"\n{inputs.name} is up in {inputs.region}, with no nodes; its addresses are in {path}. Next:")
    variant = find_variant(inputs.trainium_shape)
    _print_rest_of_road("batch", Place(inputs.region, inputs.name, registry, outputs["bucket"], variant))


def down() -> None:
    """Reads KEEP_DATA=false, KEEP_CLUSTER=true, VARS and YES=1."""
    inputs = _read_inputs()
    is_data_kept, is_cluster_kept = _truth("KEEP_DATA", True), _truth("KEEP_CLUSTER", False)
    if is_cluster_kept and not inputs.has_cluster:
        raise RecipeError("KEEP_CLUSTER=true applies to the EKS stack only: the Batch stack has no cluster")
    if is_cluster_kept and not is_data_kept:
        raise RecipeError(
            "KEEP_CLUSTER=true with KEEP_DATA=false: a cluster that stays keeps its data. Leave one of them out"
        )
    account = Account(inputs.region)
    workloads = _workloads(account, inputs)
    teardown = Teardown(account, _stack(), inputs.name, is_data_kept, is_cluster_kept, workloads)
    print(describe_leftovers(find_leftovers(account, inputs.name), inputs.name, inputs.region))
    teardown.look_around()
    if is_cluster_kept:
        question = f"Remove what Millrace made on {workloads.place} in {inputs.region}, and keep the cluster?"
    elif is_data_kept:
        question = f"Take down {inputs.name} in {inputs.region}, and keep its bucket, file system and images?"
    else:
        question = f"Take down {inputs.name} in {inputs.region} WITH ITS DATA, all checkpoints and images?"
    require_yes(question)
    teardown.run()
    print(describe_leftovers(find_leftovers(account, inputs.name), inputs.name, inputs.region))


def leftovers() -> None:
    """Reads VARS."""
    inputs = _read_inputs()
    with explaining_refusals("leftovers"):
        found = find_leftovers(Account(inputs.region), inputs.name)
    print(describe_leftovers(found, inputs.name, inputs.region))


def _workloads(account: Account, inputs: Inputs) -> Workloads:
    if inputs.has_cluster:
        return ClusterWorkloads(account, inputs.name, _settings())
    return BatchWorkloads(account, inputs.name, _config(), _find_notice_seconds)


def _find_notice_seconds() -> int:
    """Seconds between a stop's notice and the kill on the Batch stack as it is applied; 0 if the stack does not say."""
    found = re.search(r"^NOTICE_SECONDS=(\d+)$", str(_stack().outputs().get("config", "")), re.MULTILINE)
    return int(found[1]) if found else 0


def _describe_cost(inputs: Inputs) -> str:
    return describe_cost(_sizes(inputs), _hours(), load_recipe(_recipe()), _today())


def _today() -> date:
    return datetime.now(UTC).date()


def _sizes(inputs: Inputs) -> Sizes:
    return sizes_of(inputs, _nodes(inputs), _whole_number("CPU_NODES", 0))


def _nodes(inputs: Inputs) -> int:
    return _whole_number("NODES", inputs.trainium_max_nodes)


def _addresses_per_node() -> int | None:
    """Addresses that a node takes in the applied Trainium subnet; None if terraform's state is elsewhere."""
    found = _stack().outputs().get("addresses_per_node")
    return None if found is None else int(found)


def _images(inputs: Inputs) -> dict[str, str]:
    """Maps repositories to the tags that `make deploy-stage` and `make cluster-up` would use. Batch needs no head."""
    chosen = os.environ.get("TAG", "")
    services = SERVICES if inputs.has_cluster else STAGES
    variant = find_variant(inputs.trainium_shape)
    return {f"{inputs.repositories}/{each}": chosen or describe_build(each, variant).commit_tag for each in services}


def _whole_number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdigit():
        raise RecipeError(f"{name}={text}: expected a whole number, such as {name}=4")
    return int(text)


def _hours() -> float:
    text = os.environ.get("HOURS") or str(HOURS)
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 < hours < float("inf"):
        raise RecipeError(f"HOURS={text}: expected the hours of a run, such as HOURS=24")
    return hours


def _recipe() -> Path:
    """The recipe, RECIPE=FILE, whose checkpoint has to fit the file system's speed."""
    return Path(os.environ.get("RECIPE") or RECIPE)


def _truth(name: str, default: bool) -> bool:
    text = (os.environ.get(name) or str(default)).lower()
    if text not in ("true", "1", "false", "0"):
        raise RecipeError(f"{name}={text}: expected true or false")
    return text in ("true", "1")


def _chosen_releases() -> list[Release]:
    return choose_releases(read_releases(), os.environ.get("ONLY", ""))


def _stack() -> Stack:
    return Stack(_folder(), _variables_file())


def _read_variables() -> dict[str, Any]:
    return read_variables(_variables_file(), _folder())


def _read_inputs(needs_place: bool = True) -> Inputs:
    return read_inputs(_read_variables(), needs_place, _folder())


def _folder() -> Path:
    """STACK: eks, batch, or the folder of the user's own root module around these modules."""
    chosen = os.environ.get("STACK") or STACK.name
    return STACK.parent / chosen if (STACK.parent / chosen / "main.tf").is_file() else Path(chosen)


def _settings() -> Path:
    """The settings file of OVERLAY, a name in k8s/overlays or a folder, as `make cluster-up` takes it."""
    overlay = os.environ.get("OVERLAY") or "eks"
    folder = Path(overlay) if Path(overlay).is_dir() else OVERLAYS / overlay
    if not folder.is_dir():
        raise RecipeError(f"OVERLAY={overlay}: no such overlay; expected eks, or the folder of your own overlay")
    return folder / SETTINGS.name


def _config() -> Path:
    return Path(os.environ.get("CONFIG") or CONFIG)


def _variables_file() -> Path | None:
    return Path(os.environ["VARS"]) if os.environ.get("VARS") else None


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
