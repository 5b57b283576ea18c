"""The commands of `millrace`, and the program of the repository that each of them starts."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from millrace import TREE
from millrace.recipe import find_recipe
from services.common.errors import DeviceError

RECIPE, RECIPES, RUN, DEPLOY = "--recipe", "recipe...", "run", "deploy.commands"
HELP = ("-h", "--help")
LIBRARIES = {"tokenizer": "numba", "compiler": "torch", "trainer": "transformers", "deploy": "kubernetes"}
"""A library that only this extra of the package brings, or that stands for its others."""


@dataclass(frozen=True)
class Call:
    """The start of a program: `python -m MODULE WORDS`."""

    module: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"python -m {self.module} {shlex.join(self.words)}".rstrip()


@dataclass(frozen=True)
class Program:
    """What a command of `millrace` starts. All options and recipe overrides are passed on."""

    help: str
    module: str
    words: tuple[str, ...] = ()
    """First words of the program: its subcommand."""
    first: str = RECIPE
    """The option that the first word of the command is the value of, or RECIPES, or RUN; empty where there is none."""
    default: str = ""
    """The first word where it is left out."""

    @property
    def usage(self) -> str:
        first = self.first.lstrip("-").upper()
        return f"[{first}] [OPTIONS]" if self.default else f"{first} [OPTIONS]".lstrip()

    def call(self, words: Sequence[str]) -> Call:
        """Return what the command starts when these words follow it."""
        given = list(words)
        if self.default and not (given and is_value(given[0])) and RECIPE not in {each.split("=")[0] for each in given}:
            given.insert(0, self.default)
        if self.first == RECIPES:
            given = [str(find_recipe(word)) if is_value(word) else word for word in given]
        elif self.first.startswith("--") and given and is_value(given[0]):
            value = str(find_recipe(given[0])) if self.first == RECIPE else given[0]
            given[:1] = [self.first, value]
        if self.module == DEPLOY:
            given = join_overrides(given)
        return Call(self.module, (*self.words, *given))


def is_value(word: str) -> bool:
    return not word.startswith("-")


def join_overrides(words: Sequence[str]) -> list[str]:
    """Return the words, with recipe overrides `--section.key=value` in `--args`, as deploy commands take them."""
    overrides = [word for word in words if re.match(r"--([^=]*\.|name=)", word)]
    rest = [word for word in words if word not in overrides]
    if overrides and "--args" in rest[:-1]:
        at = rest.index("--args")
        overrides = [*shlex.split(rest[at + 1]), *overrides]
        del rest[at : at + 2]
    return [*rest, "--args", shlex.join(overrides)] if overrides else rest


def require_installed(call: Call) -> None:
    """Raise `DeviceError` where libraries of the program are not installed."""
    lacking = [extra for extra in list_extras(call) if find_spec(LIBRARIES[extra]) is None]
    if lacking:
        libraries = ", ".join(LIBRARIES[extra] for extra in lacking)
        raise DeviceError(f"python -m {call.module} needs {libraries}, expected from: {advise_install(*lacking)}")


def advise_install(*extras: str) -> str:
    """Return the command that installs extras of this package from where it was installed."""
    import json  # noqa: PLC0415 - the help needs neither
    from importlib.metadata import distribution  # noqa: PLC0415

    pip = f"{sys.executable} -m pip install" if find_spec("pip") else f"uv pip install --python {sys.executable}"
    if (TREE / "pyproject.toml").is_file():
        return f"{pip} -e '{TREE}[{','.join(extras)}]'"
    origin = json.loads(distribution("millrace").read_text("direct_url.json") or "{}")
    url, commit = origin.get("url"), origin.get("vcs_info")
    if commit:
        url = f"{commit['vcs']}+{url}@{commit['commit_id']}"
    return f"{pip} 'millrace[{','.join(extras)}]{f' @ {url}' if url else ''}'"


def list_extras(call: Call) -> list[str]:
    """Return the extras of the package whose libraries the program imports."""
    if call.module == DEPLOY:
        options = " ".join(call.words).replace("--target ", "--target=").split()
        target = next(
            (each for each in options if each.startswith("--target=")), f"--target={os.environ.get('TARGET')}"
        )
        is_here = call.words[0] == "demo" or target == "--target=local"
        return ["tokenizer", "trainer"] if is_here else ["deploy"]
    return [extra for extra in LIBRARIES if call.module == f"services.{extra}"]


def _trainer(name: str, help: str, first: str = RECIPE) -> Program:
    return Program(help, "services.trainer", (name,), first)


def _deploy(name: str, help: str, first: str = "--stage", default: str = "") -> Program:
    return Program(help, DEPLOY, (name,), first, default)


PROGRAMS: dict[str, dict[str, Program]] = {
    "Run on this machine": {
        "demo": _deploy("demo", "Tokenize, compile and train a recipe, and show the run.", RECIPE, "tiny-cpu"),
        "tokenize": Program("Turn text into a corpus of packed token rows.", "services.tokenizer"),
        "compile": Program("Compile all graphs of a recipe's program.", "services.compiler"),
        "train": Program("Train the recipe's model, from the newest checkpoint on.", "services.trainer"),
    },
    "Before a run": {
        "plan": _trainer("plan", "Estimate memory, time, cost and checkpoints of a run."),
        "doctor": _trainer("doctor", "Check all requirements of a run."),
        "train-vocab": Program("Train a SentencePiece tokenizer.", "services.tokenizer", ("train-vocab",), ""),
        "pin": Program("Pin the data sets of recipes to commits.", "services.tokenizer", ("pin",), RECIPES),
    },
    "Runs and artifacts": {
        "runs": _trainer("runs", "List runs and branches: state, steps, loss, cost.", ""),
        "compare": _trainer("compare", "Compare runs, by names or by prefixes of several.", "run..."),
        "report": _trainer("report", "Write the report of a run, also while it goes on.", RUN),
        "summary": _trainer("summary", "Print what the three stages made.", RUN),
        "sample": _trainer("sample", "Let the newest checkpoint continue a prompt.", RUN),
        "evaluate": _trainer("evaluate", "Evaluate a checkpoint on a corpus.", RUN),
        "export": _trainer("export", "Write a checkpoint for Hugging Face or NxD.", RUN),
        "import": _trainer("import", "Start a run with weights of Hugging Face, NxD or DCP."),
        "inspect-checkpoint": _trainer("inspect-checkpoint", "Print the metadata and tensors of a checkpoint.", RUN),
        "artifacts": Program("Verify, show, list or clean up artifacts.", "services.common.artifacts", (), ""),
    },
}
"""Programs by their commands, in groups as the help shows them."""

DEPLOY_PROGRAMS = {
    "stage": _deploy("deploy-stage", "Deploy a stage, and follow it to its end."),
    "pipeline": _deploy("pipeline", "Run the three stages, in one live view.", RECIPE),
    "status": _deploy("stage-status", "Show which stages are deployed, and how the last ended.", ""),
    "logs": _deploy("stage-logs", "Follow a stage that is deployed."),
    "stop": _deploy("stop-stage", "Let a stage commit a checkpoint, then end its deployment."),
    "rollback": _deploy("rollback-stage", "Deploy the previous image with which a stage succeeded."),
    "run": _deploy("stage-run", "Run a subcommand of a stage in a short job: --command 'WORD ...'."),
}
"""The commands of `millrace deploy`."""
