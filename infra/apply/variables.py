"""Reads the values of a stack's variables as terraform does: defaults, TF_VAR_, `terraform.tfvars`, then VARS=FILE.

Terraform evaluates a copy of the declarations alone, without resources and providers, so no network and no account is
needed, and types and the defaults inside of `optional` are terraform's own.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.apply.terraform import STACK
from infra.child_process import find_program
from services.common.errors import RecipeError

FILES = ("terraform.tfvars", "terraform.tfvars.json", "*.auto.tfvars", "*.auto.tfvars.json")
# Blocks as terraform fmt writes them.
DECLARATION = re.compile(r'^variable "(\w+)" \{(?:[^\n]*\}$|.*?^\})', re.MULTILINE | re.DOTALL)
VALIDATION = re.compile(r"^  validation \{\n.*?^  \}\n", re.MULTILINE | re.DOTALL)
BEYOND = re.compile(r"\b(local|data|module|path)\.|\bfileexists\(")  # which only the stack's own plan can check
UNDECLARED = "Value for undeclared variable"  # of which terraform only warns


def read_variables(given: Path | None, folder: Path = STACK) -> dict[str, Any]:
    """Values by name; None for a variable without a value.

    Raises `RecipeError` for a value that terraform refuses, and for a name that the stack does not declare.
    """
    if given and not given.is_file():
        raise RecipeError(f"VARS={given}: no such file; expected a .tfvars file for the stack {folder}")
    files = [path for pattern in FILES for path in sorted(folder.glob(pattern))] + ([given] if given else [])
    with TemporaryDirectory(prefix="millrace-variables-") as scratch:
        (Path(scratch) / "main.tf").write_text(_make_module(folder), encoding="utf-8")
        options = [f"-var-file={path.resolve()}" for path in files]
        messages = _run(scratch, "plan", "-json", "-input=false", "-out=plan", *options)
        found = [json.loads(line).get("diagnostic") for line in messages.splitlines() if line.startswith("{")]
        diagnostics = [each for each in found if each]
        if errors := [_describe_error(each) for each in diagnostics if each["severity"] == "error"]:
            raise RecipeError("\n".join(errors))
        shown = json.loads(_run(scratch, "show", "-json", "plan"))
    values: dict[str, Any] = shown["planned_values"]["outputs"]["values"]["value"]
    if misspelt := list(_list_misspelt(diagnostics, shown["variables"], values)):
        raise RecipeError("\n".join(misspelt))
    return values


def _make_module(folder: Path) -> str:
    """A module with the stack's declarations, in whichever of its files, and one output with all values."""
    blocks = {
        match[1]: _isolate(match[0])
        for path in sorted(folder.glob("*.tf"))
        for match in DECLARATION.finditer(path.read_text(encoding="utf-8"))
    }
    values = "\n".join(f"    {name} = var.{name}" for name in blocks)
    return "\n".join([*blocks.values(), f'output "values" {{\n  value = {{\n{values}\n  }}\n}}\n'])


def _isolate(block: str) -> str:
    """A declaration that stands alone, with a default: people ask for a price before they choose a region."""
    if re.search(r"\bdefault\s*=", block):
        return VALIDATION.sub(lambda found: "" if BEYOND.search(found[0]) else found[0], block)
    nothing = '""' if re.search(r"\btype\s*=\s*string", block) else "null"  # messages cannot contain null
    return VALIDATION.sub("", block).replace("{", f"{{\n  default = {nothing}\n", 1)


def _run(folder: str, *arguments: str) -> str:
    command = [find_program("terraform"), f"-chdir={folder}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _describe_error(diagnostic: dict[str, Any]) -> str:
    place = diagnostic.get("range")
    where = f"{place['filename']}:{place['start']['line']}: " if place else ""
    detail = diagnostic["detail"].partition("\n\nThis was checked by")[0]
    return f"{where}{diagnostic['summary']}: {detail}"


def _list_misspelt(
    diagnostics: Iterable[dict[str, Any]], given: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[str]:
    """Undeclared names: terraform warns of a variable in a file, and drops attributes and TF_VAR_ without a word."""
    for each in diagnostics:
        if each["summary"] == UNDECLARED:
            name, file = re.findall('"(.*?)"', each["detail"])[:2]
            yield f"{file}: {_describe_unknown(name, values, 'variable of the stack')}"
    for name, variable in given.items():
        value = variable.get("value")
        for attribute in value.keys() - values[name].keys() if isinstance(value, dict) else ():
            yield _describe_unknown(f"{name}.{attribute}", values[name], f"attribute of {name}")
    for name in sorted(os.environ):
        if name.startswith("TF_VAR_") and name.removeprefix("TF_VAR_") not in values:
            yield _describe_unknown(name, values, "variable of the stack")


def _describe_unknown(name: str, known: Iterable[str], kind: str) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name.removeprefix("TF_VAR_").rpartition(".")[2], names, n=1)
    nearest = f" Did you mean {near[0]}?" if near else ""
    return f"{name} is no {kind}.{nearest} Expected one of {', '.join(names)}"
