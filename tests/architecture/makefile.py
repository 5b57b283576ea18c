"""Reads the Makefile: its targets, and the variables with which each can be called."""

from __future__ import annotations

import re
from functools import cache

from deploy.client.variables import ELSEWHERE, TARGETS, VARIABLES
from tests.architecture.imports import REPOSITORY

_PACKAGE = re.compile(r"python -m ([\w.]+)|-m ([\w.]+)")
_RULE = re.compile(r"^([a-z][\w-]*):(?!=) *([^#\n]*)(.*)\n((?:\t.*\n)*)", re.MULTILINE)


@cache
def rules() -> dict[str, tuple[list[str], str]]:
    """Prerequisites and recipe text of each target, with the Makefile's own variables replaced by their values."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    values = dict(re.findall(r"^([a-z_]+) *[:?]?= *(.*)$", text, re.MULTILINE))

    def expand(recipe: str) -> str:
        for _ in values:
            recipe = re.sub(r"\$\(([a-z_]+)\)", lambda found: values.get(found[1], ""), recipe)
        return recipe

    return {
        target: (prerequisites.split(), expand(f"{comment}\n{recipe}"))
        for target, prerequisites, comment, recipe in _RULE.findall(text)
    }


def takes(target: str, variable: str, deploy_target: str) -> bool:
    """Does the target, or what it runs, read the variable?"""
    if "deploy.commands" in rules()[target][1] and variable in VARIABLES:
        return VARIABLES[variable].is_taken(target, deploy_target or TARGETS[0])
    if variable != "TORCH" and ELSEWHERE.fullmatch(variable):
        return True
    quoted = re.compile(rf"\$[({{]{variable}\b|[\"']{variable}[\"']")
    return any(quoted.search(source) for source in _sources_of(target))


def _sources_of(target: str) -> list[str]:
    """Texts of the Makefile and of the programs in which a variable of the target can be read."""
    prerequisites, recipe = rules()[target]
    sources = [recipe]
    if "./bootstrap" in recipe:
        sources.append((REPOSITORY / "bootstrap").read_text(encoding="utf-8"))
    for found in _PACKAGE.findall(recipe):
        package = REPOSITORY / "".join(found).replace(".", "/")
        sources += [path.read_text(encoding="utf-8") for path in package.rglob("*.py") if "tests" not in path.parts]
    for prerequisite in prerequisites:
        sources += _sources_of(prerequisite)
    return sources
