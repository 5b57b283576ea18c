"""Makes, prices, checks and takes down the infrastructure: `python -m infra COMMAND`.

The Makefile's targets call it, and `make help TARGET=infra-up` lists the environment variables that each command reads.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from images.platforms import find_variant
from infra.account.session import Account, explaining_refusals
from infra.addons.releases import choose_releases, install_releases, print_differences, read_releases
from infra.apply.inputs import Inputs, read_inputs, require_own_values
from infra.apply.overlay_settings import SETTINGS, write_settings
from infra.apply.renewal import check_renewal, list_renewed_pools
from infra.apply.terraform import STACK, Plan, Stack, describe_plan
from infra.apply.variables import read_variables
from infra.cost.estimate import describe_cost, require_budget
from infra.preflight.addons import list_refused_values
from infra.preflight.checks import check_machine_image, run_preflight
from infra.teardown.leftovers import describe_leftovers, find_leftovers
from infra.teardown.sequence import Teardown, Workloads
from infra.workloads.batch_workloads import BatchWorkloads
from infra.workloads.cluster_workloads import ClusterWorkloads
from services.common.artifacts.manifest import write_durably
from services.common.errors import DeviceError, RecipeError
from services.common.process.entry_point import exit_code_of, run_main
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import stage_nodes

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
TOKENIZER_FILE = """\
A tokenizer file of your own needs no token for a gated one; name it in a copy of the recipe (tokenizer.model):
  aws s3 cp tokenizer.model s3://{bucket}/tokenizer/tokenizer.model"""


class Given(BaseModel):
    """The environment variables, which the Makefile describes."""

    STACK: str = STACK.name
    """eks, batch, or the folder of the user's own root module around these modules."""
    VARS: Path | None = None
    OVERLAY: str = "eks"
    CONFIG: Path = CONFIG
    NODES: NonNegativeInt | None = None
    CPU_NODES: NonNegativeInt = 0
    HOURS: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    RECIPE: Path = RECIPE
    ONLY: str = ""
    DRY_RUN: bool = False
    KEEP_DATA: bool = True

    @property
    def folder(self) -> Path:
        for folder in (STACK.parent / self.STACK, Path(self.STACK)):
            if (folder / "main.tf").is_file():
                return folder
        raise RecipeError(
            f"STACK={self.STACK}: no main.tf there. Expected eks, batch, or your own root module's folder"
        )

    @property
    def stack(self) -> Stack:
        return Stack(self.folder, self.VARS)

    @property
    def settings(self) -> Path:
        """The settings file of OVERLAY, a name in k8s/overlays or a folder, as `make cluster-up` takes it."""
        for folder in (Path(self.OVERLAY), OVERLAYS / self.OVERLAY):
            if folder.is_dir():
                return folder / SETTINGS.name
        raise RecipeError(f"OVERLAY={self.OVERLAY}: no such overlay; expected eks, or the folder of your own overlay")

    def read_inputs(self, needs_place: bool = True, needs_own_values: bool = False) -> Inputs:
        variables = read_variables(self.VARS, self.folder)
        if needs_own_values:
            require_own_values(variables)
        return read_inputs(variables, needs_place, self.folder)


def main(argv: list[str]) -> int:
    commands = {each.__name__: each for each in (addons, cost, down, leftovers, plan, preflight, up)}
    parser = argparse.ArgumentParser(prog="python -m infra", description=__doc__)
    parser.add_argument("command", choices=commands)
    chosen = parser.parse_args(argv).command
    try:
        given = Given.model_validate({name: os.environ[name] for name in Given.model_fields if os.environ.get(name)})
    except ValidationError as error:
        wrong = (f"{each['loc'][0]}={each['input']}: {each['msg']}" for each in error.errors())
        raise RecipeError("; ".join(wrong)) from None
    with explaining_refusals(f"infra {chosen}"):
        commands[chosen](given)
    return 0


def addons(given: Given) -> None:
    releases = choose_releases(read_releases(), given.ONLY)
    if given.DRY_RUN:
        print_differences(releases)
    else:
        install_releases(releases)


def cost(given: Given) -> None:
    # People ask for a price before they choose a region.
    print(_describe_cost(given, given.read_inputs(needs_place=False)))


def preflight(given: Given) -> None:
    inputs = given.read_inputs(needs_own_values=True)
    nodes = inputs.trainium.max_nodes if given.NODES is None else given.NODES
    _require_met(run_preflight(Account(inputs.region), inputs, nodes))
    print("all requirements that can be checked from here are met")


def plan(given: Given) -> None:
    found, _ = _make_plan(given, given.stack, is_quiet=False)
    print(describe_plan(found))


def up(given: Given) -> None:
    stack = given.stack
    found, inputs = _make_plan(given, stack, is_quiet=True)
    print(f"\n{describe_plan(found)}; make infra-up DRY_RUN=1 shows the whole plan")
    if lost := [change.address for change in found.changes if change.is_loss_of_data]:
        raise DeviceError(
            f"terraform would destroy {', '.join(lost)} with its data. Nothing was changed. Undo the change of name, "
            f"zone_id, network or fsx that replaces it; to start with empty storage, first make infra-down "
            f"KEEP_DATA=false"
        )
    if renewed := list_renewed_pools(found):
        _require_met(check_renewal(Account(inputs.region), inputs, renewed))
    if found.is_applyable:
        _require_yes(f"Apply this plan in {inputs.region}?")
        stack.apply()
    _write_addresses(given, stack, inputs)


def _make_plan(given: Given, stack: Stack, is_quiet: bool) -> tuple[Plan, Inputs]:
    """Plans the stack and prints its cost.

    Raises `RecipeError` for values that the stack does not take, for those of the example, and for a budget below the
    idle stack's cost, and `DeviceError` for an instance type on which no image computes, a machine image whose driver
    the images do not accept, or values that an add-on of EKS refuses.
    """
    inputs = given.read_inputs(needs_own_values=True)
    stack.init()
    found = stack.plan(is_quiet=is_quiet)
    print(_describe_cost(given, inputs))
    require_budget(inputs, _today())
    _require_met(
        [
            *check_machine_image(inputs)[1],
            *list_refused_values(Account(inputs.region), found, inputs.kubernetes_version),
        ]
    )
    return found, inputs


def _write_addresses(given: Given, stack: Stack, inputs: Inputs) -> None:
    """Writes the file that deployments read, settings.env or config.txt, and prints the commands that come next."""
    outputs = stack.outputs()
    if inputs.has_cluster:
        path, commands, registry = given.settings, NEXT_ON_EKS, str(outputs["registry"])
        write_settings(outputs, path)
    else:
        path, commands, config = given.CONFIG, NEXT_ON_BATCH, str(outputs["config"])
        write_durably(path, config.encode())
        [registry] = re.findall(r"^ECR_REPO=([^/\n]+)", config, re.MULTILINE)
    print(f"\n{inputs.name} is up in {inputs.region}, with 0 Trainium nodes; its addresses are in {path}. Next:")
    names = {"region": inputs.region, "name": inputs.name, "registry": registry, "bucket": outputs["bucket"]}
    print(f"{commands}\n{TOKENIZER_FILE}".format(**names, variant=find_variant(inputs.trainium.shape)))


def down(given: Given) -> None:
    inputs = given.read_inputs()
    account, stack = Account(inputs.region), given.stack
    workloads: Workloads = BatchWorkloads(account, inputs.name, given.CONFIG)
    if inputs.has_cluster:
        workloads = ClusterWorkloads(account, inputs.name, given.settings)
    teardown = Teardown(account, stack, inputs.name, given.KEEP_DATA, workloads)
    leftovers(given)
    teardown.check_neighbours()
    if given.KEEP_DATA:
        question = f"Take down {inputs.name} in {inputs.region}, and keep its bucket, file system and images?"
    else:
        question = f"Take down {inputs.name} in {inputs.region} WITH ITS DATA, all checkpoints and images?"
    _require_yes(question)
    teardown.run()
    leftovers(given)


def leftovers(given: Given) -> None:
    inputs = given.read_inputs()
    print(describe_leftovers(find_leftovers(Account(inputs.region), inputs.name), inputs.name, inputs.region))


def _describe_cost(given: Given, inputs: Inputs) -> str:
    recipe = load_recipe(given.RECIPE)
    nodes = stage_nodes(recipe, "trainer") if given.NODES is None else given.NODES
    return describe_cost(inputs, nodes, given.CPU_NODES, given.HOURS, recipe, _today())


def _require_met(problems: Iterable[str]) -> None:
    """Raises `DeviceError` with all problems, if there are any."""
    if lines := [f"\n  - {each}" for each in problems]:
        are = "requirement is" if len(lines) == 1 else "requirements are"
        raise DeviceError(f"{len(lines)} {are} not met; nothing was changed:{''.join(lines)}")


def _require_yes(question: str) -> None:
    """Asks on the terminal; `YES=1` answers yes.

    Raises `RecipeError` without a terminal, or for any other answer than yes.
    """
    if os.environ.get("YES", "") not in ("", "0"):
        print(f"{question} yes (YES=1)", flush=True)
        return
    if not sys.stdin.isatty():
        raise RecipeError(f"{question} There is no terminal to ask on; set YES=1 to answer yes")
    print(f"{question} Type yes to continue: ", end="", flush=True)
    if (answer := sys.stdin.readline().strip()) != "yes":
        raise RecipeError(f"{answer!r} is not yes. Nothing was changed.")


def _today() -> date:
    return datetime.now(UTC).date()


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_main(main, sys.argv[1:])))
