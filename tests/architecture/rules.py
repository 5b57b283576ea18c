"""Rules that import-linter and ruff cannot state: each is a function that returns the violations.

pyproject.toml has the rules of who imports whom.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.architecture.imports import (
    calls_of,
    closure_of,
    modules_of,
    third_parties_of,
    words_of,
)

STAGES = ("tokenizer", "compiler", "trainer")
SERVICES = (*STAGES, "head")
NEURON = {"torch_neuronx", "neuronx_distributed", "neuronxcc", "libneuronxla", "torch_xla", "nki"}


def requirements_name_what_is_imported(root: Path, distributions: Mapping[str, Sequence[str]]) -> list[str]:
    """Every third-party library that a stage imports, directly or through services.common, is in its requirements.txt
    or in those of common and the program, unless an `except ImportError` does without it.

    `distributions` maps import names to distributions; a name without one stands for itself.
    """
    modules = modules_of(root)
    problems = []
    for stage in STAGES:
        stage_modules = {module for module in modules if module.startswith(f"services.{stage}.")}
        reached = closure_of(modules, stage_modules, with_optional=False)
        named = requirements_of(root, stage) | requirements_of(root, "common")
        if any(module.startswith("services.common.program.") for module in reached):
            named |= requirements_of(root, "common/program")
        for module in sorted(reached):
            third_parties = third_parties_of(modules[module], with_optional=False)
            for name in sorted(third_parties - NEURON):  # part of the Neuron image
                if not named & {_normal(each) for each in distributions.get(name, [name])}:
                    problems.append(f"{module} imports {name}, which requirements.txt of {stage} does not name")
    return problems


def requirements_of(root: Path, service: str) -> set[str]:
    lines = (root / "services" / service / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {_normal(line) for line in lines if line.strip() and not line.startswith(("#", "-"))}


def tests_draw_seeds_in_one_place(root: Path) -> list[str]:
    """Random numbers come from a printed seed, so that a failure can be repeated."""
    paths = [path for folder in ("services", "tests", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    return [
        f"{path.relative_to(root)} calls {name}; use services.common.testing.seeds.draw_seed"
        for path in paths
        if path != root / "services/common/testing/seeds.py"
        for name, has_arguments in calls_of(path)
        if re.fullmatch(r"random\.(?!Random$)\w+|(np|numpy)\.random\.(?!default_rng$)\w+", name)
        or (not has_arguments and re.fullmatch(r"(random\.)?Random|((np|numpy)\.random\.)?default_rng", name))
    ]


def one_folder_of_the_program_names_neuron(root: Path) -> list[str]:
    """The program is one for all devices: what Neuron does otherwise is behind the Protocol of the backends."""
    return [
        f"{module} says {word!r}; put what differs behind services.common.program.backends.protocol"
        for module, path in modules_of(root).items()
        if module.startswith("services.common.program.") and not module.startswith("services.common.program.backends.")
        for word in words_of(path)
        if "neuron" in word.lower()
    ]


def services_is_no_package(root: Path) -> list[str]:
    """Images merge folders into `services`, so no `__init__.py` there can belong to one of them."""
    return [str(path) for path in [root / "services" / "__init__.py"] if path.exists()]


def services_have_their_documents(root: Path) -> list[str]:
    names = ("README.md", "CHANGELOG.md", "VERSION", "requirements.txt")
    files = [root / "services" / service / name for service in SERVICES for name in names]
    return [f"{path}: missing or empty" for path in files if not path.is_file() or not path.read_bytes().strip()]


def versions_are_in_the_changelog(root: Path) -> list[str]:
    problems = []
    for stage in SERVICES:
        folder = root / "services" / stage
        version = (folder / "VERSION").read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            problems.append(f"{stage}: VERSION is {version!r}, expected MAJOR.MINOR.PATCH")
        if version not in (folder / "CHANGELOG.md").read_text(encoding="utf-8"):
            problems.append(f"{stage}: CHANGELOG.md does not mention {version}")
    return problems


def _normal(requirement: str) -> str:
    """Return a requirement's distribution name in its normalized form."""
    name = re.split(r"[\s\[<>=!~;#]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()
