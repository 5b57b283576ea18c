"""Every command that a document shows exists, with the options and variables that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.commands.__main__ import TARGETS, explain_inapplicable
from images.platforms import REPOSITORY
from millrace.programs import DEPLOY_PROGRAMS, PROGRAMS
from services.common.recipe.file import read_override
from tests.architecture.documents import Document, read_documents
from tests.deploy.typed import COMMANDS
from tests.makefile import read_rules, read_variables

DOCUMENTS = read_documents()
RULES = read_rules()
STAGES = re.compile(r"services\.(tokenizer|compiler|trainer)")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference pages, as the site has them: made by a process of their own, which imports every program."""
    folder = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, "-m", "docs.site.reference", str(folder)], cwd=REPOSITORY, check=True)
    return folder


@pytest.fixture(scope="module")
def helps(reference: Path) -> dict[str, str]:
    """The help of each command, by its words after `python -m`."""
    page = (reference / "commands.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## python -m ([^\n]+)\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def recipe_keys(reference: Path) -> set[str]:
    page = (reference / "recipe.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_make_targets_exist_with_their_variables(document: Document) -> None:
    commands = [words for words in map(started_by, document.commands()) if words[0] == "make"]
    assert [problem for words in commands for problem in problems_of_make(words)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_programs_exist_with_their_options(document: Document, helps: dict[str, str], recipe_keys: set[str]) -> None:
    commands = [command for words in map(started_by, document.commands()) for command in programs_in(words)]
    assert [problem for words in commands for problem in problems_of_program(words, helps, recipe_keys)] == []


def started_by(words: list[str]) -> list[str]:
    """The command that a command of `millrace` starts. Others are as they were."""
    if words[0] != "millrace":
        return words
    name, rest = words[1], words[2:]
    if name == "deploy" and rest:
        name, programs = rest[0], DEPLOY_PROGRAMS
        rest = rest[1:]
    else:
        programs = {command: each for group in PROGRAMS.values() for command, each in group.items()}
    if name not in programs:
        return ["python", "millrace" if name.startswith("-") else f"millrace.{name}", *rest]
    call = programs[name].call(rest)
    return ["python", call.module, *call.words]


def programs_in(words: list[str]) -> Iterator[list[str]]:
    """Module and arguments of the programs that a command runs: itself, or what `make` passes on."""
    if words[0] == "python":
        yield words[1:]
        return
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    stage = variables.get("STAGE", "")
    if stage and "COMMAND" in variables:
        yield [f"services.{stage}", *shlex.split(variables["COMMAND"])]
    elif "ARGS" in variables:
        package = "benchmarks" if words[1] == "benchmark" else "services"
        yield [f"{package}.{stage or 'trainer'}", *shlex.split(variables["ARGS"])]


def problems_of_make(words: list[str]) -> list[str]:
    names = [word for word in words[1:] if re.fullmatch(r"[a-z][\w-]*", word)]
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    unknown = [f"make {name}: no such target" for name in names if name not in RULES]
    return unknown + [
        f"make {name}: takes no {variable}"
        for variable in variables
        for name in RULES.keys() & {*names}
        if not takes(name, variable, variables.get("TARGET", ""))
    ]


def takes(target: str, variable: str, deploy_target: str) -> bool:
    """Does the target's help explain the variable, and does a deploy command take it on the named deploy target?"""
    if target in COMMANDS and target != "demo":
        named = next((each for each in TARGETS if each == deploy_target), TARGETS[0])
        return variable in COMMANDS[target] and not explain_inapplicable(variable, target, named)
    return variable in read_variables(target)


def problems_of_program(words: list[str], helps: dict[str, str], recipe_keys: set[str]) -> list[str]:
    module, *arguments = words
    if re.search(r"[<{$]|\.$|[A-Z]", module) or module in ("pytest", "pip", "ensurepip"):
        return []
    if not any((REPOSITORY / module.replace(".", "/")).with_suffix(suffix).exists() for suffix in ("", ".py")):
        return [f"{module}: no such module"]
    subcommands = {name.partition(" ")[2] for name in helps if name.startswith(f"{module} ")}
    name = module
    if arguments[:1] == ["artifacts"] and STAGES.match(module):
        return problems_of_program(["services.common.artifacts", *arguments[1:]], helps, recipe_keys)
    if arguments and re.fullmatch(r"[a-z][a-z-]*", arguments[0]) and subcommands:
        if arguments[0] not in subcommands:
            return [f"{module}: no subcommand {arguments[0]}"]
        name = f"{module} {arguments[0]}"
    problems, known = [], re.findall(r"--[\w-]+", helps.get(name, ""))
    for word in arguments:
        if override := read_override(word):
            if override[0] not in recipe_keys:
                problems.append(f"{name}: no recipe key {override[0]}")
        elif (option := re.match(r"--[a-z][a-z-]*", word)) and option[0] not in known:
            problems.append(f"{name}: no option {option[0]}")
    return problems
