"""The repository keeps its rules, and a violation of any rule is reported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.recipe.file import load_recipe
from tests.architecture import rules
from tests.architecture.imports import REPOSITORY

Rule = Callable[[Path], list[str]]


def requirements_name_what_is_imported(root: Path) -> list[str]:
    return rules.requirements_name_what_is_imported(root, importlib.metadata.packages_distributions())


RULES: list[Rule] = [
    rules.tests_draw_seeds_in_one_place,
    rules.one_folder_of_the_program_names_neuron,
    rules.services_is_no_package,
    rules.services_have_their_documents,
    rules.versions_are_in_the_changelog,
    requirements_name_what_is_imported,
]

# Rule, file with a violation, its content, part of the report.
BREACHES: list[tuple[Rule, str, str, str]] = [
    (
        rules.tests_draw_seeds_in_one_place,
        "services/trainer/tests/test_loop.py",
        "import random\nchosen = random.Random(random.randrange(9))",
        "services/trainer/tests/test_loop.py calls random.randrange; use",
    ),
    (
        rules.tests_draw_seeds_in_one_place,
        "tests/integration/test_all.py",
        "import numpy as np\nchosen = np.random.default_rng()",
        "tests/integration/test_all.py calls np.random.default_rng; use",
    ),
    (
        rules.one_folder_of_the_program_names_neuron,
        "services/common/program/step.py",
        '"""Neuron is fine here."""\nis_slow = device.type == "neuron"',
        "services.common.program.step says 'neuron'; put",
    ),
    (
        rules.one_folder_of_the_program_names_neuron,
        "services/common/program/loss.py",
        "from services.common.program.backends.neuron_facts import slow_paths",
        "services.common.program.loss says 'services.common.program.backends.neuron_facts'; put",
    ),
    (rules.services_is_no_package, "services/__init__.py", "", "services/__init__.py"),
    (
        rules.services_have_their_documents,
        "services/compiler/VERSION",
        "\n",
        "services/compiler/VERSION: missing or empty",
    ),
    (rules.versions_are_in_the_changelog, "services/compiler/VERSION", "0.2.0", "CHANGELOG.md does not mention 0.2.0"),
    (rules.versions_are_in_the_changelog, "services/compiler/VERSION", "one", "VERSION is 'one'"),
    (
        requirements_name_what_is_imported,
        "services/tokenizer/sources.py",
        "import pytest",
        "services.tokenizer.sources imports pytest, which requirements.txt of tokenizer does not name",
    ),
    (
        requirements_name_what_is_imported,
        "services/common/far.py",
        "import some_library",
        "services.common.far imports some_library, which requirements.txt of tokenizer does not name",
    ),
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Write a small repository that keeps all rules; its tokenizer imports services.common.far indirectly."""
    files = {
        "services/common/requirements.txt": "numpy>=2\n",
        "services/common/far.py": "import numpy",
        "services/common/near.py": "from services.common.far import something",
        "services/common/launch/launcher.py": "",
        "services/common/launch/inline.py": "",
        "services/common/launch/ray_launcher.py": "import ray",
        "services/tokenizer/__main__.py": "import services.common.near\nimport services.common.launch.launcher",
        "services/trainer/loop.py": "from services.common.launch.launcher import choose_launcher\nimport torch",
        "services/compiler/trace.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import some_stubs",
        "services/compiler/graph_plan.py": "try:\n    import some_library\nexcept ImportError:\n    pass",
    }
    for stage in rules.SERVICES:
        files[f"services/{stage}/README.md"] = stage
        files[f"services/{stage}/VERSION"] = "0.1.0\n"
        files[f"services/{stage}/CHANGELOG.md"] = "## 0.1.0\n"
        files[f"services/{stage}/requirements.txt"] = "# a comment\nray[train]==1.0\ntorch\n"
    for name, content in files.items():
        write(tmp_path / name, content)
    return tmp_path


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def heavy_imports_after(*modules: str) -> list[str]:
    """Return the slow libraries and the threads that a process has after importing the modules."""
    slow = {"boto3", "datasets", "numba", "pandas", "pyarrow", "ray", "sentencepiece", "torch", "transformers"}
    program = (
        f"import sys, threading, {', '.join(modules)}; "
        f"print(*sorted({slow} & set(sys.modules)), *[each.name for each in threading.enumerate()[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_its_rules(rule: Rule) -> None:
    assert rule(REPOSITORY) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_repository_that_keeps_the_rules_is_not_reported(repository: Path, rule: Rule) -> None:
    assert rule(repository) == []


@pytest.mark.parametrize(
    ("rule", "file", "content", "reported"), BREACHES, ids=lambda part: getattr(part, "__name__", "")
)
def test_a_violation_is_reported(repository: Path, rule: Rule, file: str, content: str, reported: str) -> None:
    write(repository / file, content)

    assert any(reported in problem for problem in rule(repository))


def test_every_rule_has_a_violation() -> None:
    assert {rule for rule, *_ in BREACHES} == set(RULES)


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
    assert heavy_imports_after("services.common.artifacts.corpus") == ["pyarrow"]
    assert "boto3" not in heavy_imports_after("services.trainer.metrics.tensorboard")


def recipes() -> Iterator[Path]:
    yield from sorted((REPOSITORY / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", list(recipes()), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_under_its_own_name(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_recipes_are_shipped() -> None:
    assert "tiny-cpu" in [path.stem for path in recipes()]
