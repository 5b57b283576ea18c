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

from images.platforms import SERVICES, find_variant
from images.versions import describe_build
from infra.account.session import Account, explaining_refusals
from infra.addons.installation import install_releases, print_differences
from infra.addons.releases import choose_releases, read_releases
from infra.apply.inputs import Inputs, read_inputs
from infra.apply.overlay_settings import SETTINGS, write_settings
from infra.apply.renewal import check_renewal, list_renewed_pools
from infra.apply.terraform import STACK, Plan, Stack, describe_plan
from infra.apply.variables import read_variables
from infra.confirmation import require_yes
from infra.cost.estimate import describe_cost, require_budget
from infra.preflight.checks import run_preflight
from infra.preflight.machine_images import check_machine_image
from infra.preflight.requirement import require_met
from infra.teardown.leftovers import describe_leftovers, find_leftovers
from infra.teardown.sequence import Teardown, Workloads
from infra.workloads.batch_workloads import BatchWorkloads
from infra.workloads.cluster_workloads import ClusterWorkloads
from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import STAGES

RECIPE = Path(__file__).parents[1] / "recipes/llama2-7b-trn1.toml"
"""The recipe that both targets deploy by default; a test compares it with theirs."""
OVERLAYS = SETTINGS.parents[1]
CONFIG = Path(__file__).parents[1] / "deploy/batch/config.txt"
PUSH_IMAGES = """\
  aws ecr get-login-password --region {region} | docker login --username AWS --password-stdin {registry}
  make images VARIANT={variant} PUSH={registry}"""
# infra/README.md and docs/operations/batch.md have the same commands; a test compares them.
NEXT_ON_EKS = f"""\
  aws eks update-kubeconfig --region {{region}} --name {{name}}
  make addons
{PUSH_IMAGES}
  make cluster-up OVERLAY=eks
  kubectl -n millrace create secret generic hugging-face --from-file=token=/dev/stdin
  make deploy-stage STAGE=tokenizer"""
NEXT_ON_BATCH = f"""\
{PUSH_IMAGES}
  make deploy-stage STAGE=tokenizer TARGET=batch"""
VOCABULARY = """\
A vocabulary file of your own needs no token for a gated one; name it in a copy of the recipe (tokenizer.model):
  aws s3 cp tokenizer.model s3://{bucket}/tokenizer/tokenizer.model"""


def main(argv: list[str]) -> int:
    commands = {each.__name__: each for each in (addons, cost, down, leftovers, plan, preflight, up)}
    parser = argparse.ArgumentParser(prog="python -m infra", description=__doc__)
    parser.add_argument("command", choices=commands)
    chosen = parser.parse_args(argv).command
    with explaining_refusals(f"infra {chosen}"):
        commands[chosen]()
    return 0


def addons() -> None:
    """Reads ONLY, names of add-ons separated by commas (all), and DRY_RUN=1, which prints what would change."""
    releases = choose_releases(read_releases(), os.environ.get("ONLY", ""))
    if os.environ.get("DRY_RUN", "") in ("", "0"):
        install_releases(releases)
    else:
        print_differences(releases)


def cost() -> None:
    """Reads NODES (the stack's maximum), CPU_NODES (0), HOURS (24), RECIPE (Llama 2 7B) and VARS."""
    # People ask for a price before they choose a region.
    print(_describe_cost(_read_inputs(needs_place=False)))


def preflight() -> None:
    """Reads NODES (the stack's maximum), TAG (the working tree's) and VARS."""
    inputs = _read_inputs()
    require_met(run_preflight(Account(inputs.region), inputs, _nodes(inputs), _images(inputs)))
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
        require_met(check_renewal(Account(inputs.region), inputs, renewed))
    if not found.is_empty:
        require_yes(f"Apply this plan in {inputs.region}?")
        stack.apply()
    _write_addresses(stack, inputs)


def _make_plan(is_quiet: bool) -> tuple[Stack, Plan, Inputs]:
    """Plans the stack and prints its cost.

    Raises `RecipeError` for values that the stack does not take, and for a budget below the idle stack's cost, and
    `DeviceError` for an instance type on which no image computes, or a machine image whose driver the images do not
    accept.
    """
    inputs, stack = _read_inputs(), _stack()
    stack.init()
    found = stack.plan(is_quiet=is_quiet)
    print(_describe_cost(inputs))
    require_budget(inputs, _today())
    require_met(check_machine_image(inputs)[1])
    return stack, found, inputs


def _write_addresses(stack: Stack, inputs: Inputs) -> None:
    """Writes the file that deployments read, settings.env or config.txt, and prints the commands that come next."""
    outputs = stack.outputs()
    if inputs.has_cluster:
        path, commands, registry = _settings(), NEXT_ON_EKS, str(outputs["registry"])
        write_settings(outputs, path)
    else:
        path, commands, config = _config(), NEXT_ON_BATCH, str(outputs["config"])
        write_durably(path, config.encode())
        [registry] = re.findall(r"^ECR_REPO=([^/\n]+)", config, re.MULTILINE)
    print(f"\n{inputs.name} is up in {inputs.region}, with 0 Trainium nodes; its addresses are in {path}. Next:")
    names = {"region": inputs.region, "name": inputs.name, "registry": registry, "bucket": outputs["bucket"]}
    print(f"{commands}\n{VOCABULARY}".format(**names, variant=find_variant(inputs.trainium.shape)))


def down() -> None:
    """Reads KEEP_DATA=false, KEEP_CLUSTER=true, VARS and YES=1."""
    inputs = _read_inputs()
    is_data_kept, is_cluster_kept = _truth("KEEP_DATA", True), _truth("KEEP_CLUSTER", False)
    if is_cluster_kept and not (inputs.has_cluster and is_data_kept):
        raise RecipeError(
            "KEEP_CLUSTER=true: only the EKS stack has a cluster, and one that stays keeps its data. Leave it out, or "
            "KEEP_DATA=false"
        )
    account = Account(inputs.region)
    workloads: Workloads = BatchWorkloads(account, inputs.name, _config(), _find_notice_seconds)
    if inputs.has_cluster:
        workloads = ClusterWorkloads(account, inputs.name, _settings())
    teardown = Teardown(account, _stack(), inputs.name, is_data_kept, is_cluster_kept, workloads)
    leftovers()
    teardown.check_neighbours()
    if is_cluster_kept:
        question = f"Remove what Millrace made on {workloads.place} in {inputs.region}, and keep the cluster?"
    elif is_data_kept:
        question = f"Take down {inputs.name} in {inputs.region}, and keep its bucket, file system and images?"
    else:
        question = f"Take down {inputs.name} in {inputs.region} WITH ITS DATA, all checkpoints and images?"
    require_yes(question)
    teardown.run()
    leftovers()


def leftovers() -> None:
    """Reads VARS."""
    inputs = _read_inputs()
    print(describe_leftovers(find_leftovers(Account(inputs.region), inputs.name), inputs.name, inputs.region))


def _find_notice_seconds() -> int:
    """Seconds between a stop's notice and the kill on the Batch stack as it is applied; 0 if the stack does not say."""
    found = re.search(r"^NOTICE_SECONDS=(\d+)$", str(_stack().outputs().get("config", "")), re.MULTILINE)
    return int(found[1]) if found else 0


def _describe_cost(inputs: Inputs) -> str:
    recipe = load_recipe(Path(os.environ.get("RECIPE") or RECIPE))
    return describe_cost(inputs, _nodes(inputs), _whole_number("CPU_NODES", 0), _hours(), recipe, _today())


def _today() -> date:
    return datetime.now(UTC).date()


def _nodes(inputs: Inputs) -> int:
    return _whole_number("NODES", inputs.trainium.max_nodes)


def _images(inputs: Inputs) -> dict[str, str]:
    """Maps repositories to the tags that `make deploy-stage` and `make cluster-up` would use. Batch needs no head."""
    chosen = os.environ.get("TAG", "")
    services = SERVICES if inputs.has_cluster else STAGES
    variant = find_variant(inputs.trainium.shape)
    return {f"{inputs.repositories}/{each}": chosen or describe_build(each, variant).commit_tag for each in services}


def _whole_number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdigit():
        raise RecipeError(f"{name}={text}: expected a whole number, such as {name}=4")
    return int(text)


def _hours() -> float:
    text = os.environ.get("HOURS") or "24"
    if not re.fullmatch(r"\d*\.?\d+", text) or not float(text):
        raise RecipeError(f"HOURS={text}: expected the hours of a run, such as HOURS=24")
    return float(text)


def _truth(name: str, default: bool) -> bool:
    text = (os.environ.get(name) or str(default)).lower()
    if text not in ("true", "1", "false", "0"):
        raise RecipeError(f"{name}={text}: expected true or false")
    return text in ("true", "1")


def _stack() -> Stack:
    return Stack(_folder(), _variables_file())


def _read_inputs(needs_place: bool = True) -> Inputs:
    return read_inputs(read_variables(_variables_file(), _folder()), needs_place, _folder())


def _folder() -> Path:
    """STACK: eks, batch, or the folder of the user's own root module around these modules."""
    chosen = os.environ.get("STACK") or STACK.name
    for folder in (STACK.parent / chosen, Path(chosen)):
        if (folder / "main.tf").is_file():
            return folder
    raise RecipeError(f"STACK={chosen}: no main.tf there. Expected eks, batch, or the folder of your own root module")


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


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
