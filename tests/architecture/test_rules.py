"""Rules that import-linter and ruff cannot state; pyproject.toml has the rules of who imports whom."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from images.platforms import REPOSITORY, SERVICES
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import STAGES
from tests.architecture.imports import closure_of, read_imports

NEURON = {"torch_neuronx", "neuronx_distributed", "neuronxcc", "libneuronxla", "torch_xla", "nki"}
"""Libraries that are a part of the Neuron image."""
RECIPES = sorted((REPOSITORY / "recipes").glob("*.toml"))


def requirements_of(folder: str) -> set[str]:
    """Distributions in a folder's requirements.txt, in their normalized form."""
    lines = (REPOSITORY / "services" / folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {normal(line) for line in lines if line.strip() and not line.startswith(("#", "-"))}


def normal(requirement: str) -> str:
    name = re.split(r"[\s\[<>=!~;#]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("stage", STAGES)
def test_requirements_name_what_is_imported(stage: str) -> None:
    """Every library that a stage imports, directly or through services.common, is in its requirements.txt or in those
    of common and the program.
    """
    own = [name for name in read_imports().modules if re.match(rf"services\.{stage}\.(?!tests)", name)]
    reached = closure_of(*own)
    named = requirements_of(stage) | requirements_of("common")
    if any(name.startswith("services.common.program.") for name in reached):
        named |= requirements_of("common/program")
    libraries = {name for name in reached if "." not in name} - {*sys.stdlib_module_names} - NEURON - {"services"}
    distributions = importlib.metadata.packages_distributions()
    assert [name for name in libraries if not named & {normal(each) for each in distributions.get(name, [name])}] == []


def test_services_is_no_package() -> None:
    """Images merge folders into `services`, so no `__init__.py` there can belong to one of them."""
    assert not (REPOSITORY / "services/__init__.py").exists()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_its_documents_and_its_version_in_the_changelog(service: str) -> None:
    folder = REPOSITORY / "services" / service
    version = (folder / "VERSION").read_text(encoding="utf-8").strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert version in changelog
    assert "## [Unreleased]\n" in changelog
    assert (folder / "README.md").stat().st_size > 0


def heavy_imports_after(*modules: str) -> list[str]:
    """The slow libraries and the threads that a process has after importing the modules."""
    slow = {"boto3", "datasets", "numba", "pandas", "pyarrow", "ray", "sentencepiece", "torch", "transformers"}
    program = (
        f"import sys, threading, {', '.join(modules)}; "
        f"print(*sorted({slow} & set(sys.modules)), *[each.name for each in threading.enumerate()[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_a_contract_is_light() -> None:
    light = (
        "services.common.recipe.schema",
        "services.common.recipe.file",
        "services.common.errors",
        "services.common.process.telemetry",
        "services.common.process.command_line",
        "services.common.artifacts.store",
        "services.common.launch.launcher",
    )
    assert heavy_imports_after(*light) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_under_its_own_name(path: Path) -> None:
    assert load_recipe(path).name == path.stem
