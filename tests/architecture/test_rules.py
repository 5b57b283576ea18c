"""The repository keeps its rules, and each rule notices when it is broken."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.recipe.file import load_recipe
from tests.architecture import rules
from tests.architecture.imports import REPOSITORY, modules_of

Rule = Callable[[Path], list[str]]


def requirements_name_what_is_imported(root: Path) -> list[str]:
    return rules.requirements_name_what_is_imported(root, importlib.metadata.packages_distributions())


RULES: list[Rule] = [
    rules.stages_import_common_alone,
    rules.program_and_artifacts_ignore_each_other,
    rules.deploy_rooms_import_what_is_below_them,
    rules.deploy_rooms_are_all_there_is,
    rules.services_ignore_the_infrastructure,
    rules.infrastructure_ignores_what_runs_on_it,
    rules.ray_is_imported_in_one_place,
    rules.neuron_is_imported_in_one_place,
    rules.the_tokenizer_never_imports_torch,
    rules.production_imports_nothing_of_tests,
    rules.tests_draw_seeds_in_one_place,
    rules.one_function_joins_paths_of_manifests,
    rules.supplied_files_are_opened_in_one_way,
    rules.services_is_no_package,
    rules.services_have_their_papers,
    rules.versions_are_in_the_changelog,
    requirements_name_what_is_imported,
]

# (the rule, the file that breaks it, its content, what is reported)
BREACHES: list[tuple[Rule, str, str, str]] = [
    (
        rules.stages_import_common_alone,
        "services/trainer/loop.py",
        "from services.tokenizer import pack",
        "services.trainer.loop imports services.tokenizer.pack",
    ),
    (
        rules.stages_import_common_alone,
        "services/common/store.py",
        "def f():\n    import services.trainer.loop",
        "services.common.store imports services.trainer.loop",
    ),
    (
        rules.program_and_artifacts_ignore_each_other,
        "services/common/program/step.py",
        "from services.common import artifacts",
        "services.common.program.step imports services.common.artifacts",
    ),
    (
        rules.program_and_artifacts_ignore_each_other,
        "services/common/artifacts/store.py",
        "from services.common.program.step import Program",
        "services.common.artifacts.store imports services.common.program.step.Program",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/controller/reaper.py",
        "def f():\n    from images.versions import describe_build",
        "k8s.controller.reaper imports images.versions.describe_build",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/objects/api.py",
        "import images",
        "k8s.objects.api imports images",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "deploy/history.py",
        "from k8s.objects import names",
        "deploy.history imports k8s.objects.names",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/controller/reaper.py",
        "from deploy.client.outline import Outline",
        "k8s.controller.reaper imports deploy.client.outline.Outline",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/controller/reaper.py",
        "from k8s import client",
        "k8s.controller.reaper imports k8s.client",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/client/commands.py",
        "from k8s.controller.decision import decide",
        "k8s.client.commands imports k8s.controller.decision.decide",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/controller/job.py",
        "from services.trainer import loop",
        "k8s.controller.job imports services.trainer.loop",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "deploy/batch/target.py",
        "from k8s.objects.api import Api",
        "deploy.batch.target imports k8s.objects.api.Api",
    ),
    (
        rules.deploy_rooms_are_all_there_is,
        "k8s/helm/chart.py",
        "",
        "k8s.helm.chart is in none of deploy, deploy.client",
    ),
    (
        rules.deploy_rooms_import_what_is_below_them,
        "k8s/client/plan.py",
        "from infra.cost import describe_cost",
        "k8s.client.plan imports infra.cost.describe_cost",
    ),
    (
        rules.services_ignore_the_infrastructure,
        "services/common/far.py",
        "from infra.shapes import find_shape",
        "services.common.far imports infra.shapes.find_shape",
    ),
    (
        rules.infrastructure_ignores_what_runs_on_it,
        "infra/teardown.py",
        "def f():\n    from k8s.client.commands import stop_stage",
        "infra.teardown imports k8s.client.commands.stop_stage",
    ),
    (
        rules.ray_is_imported_in_one_place,
        "services/trainer/loop.py",
        "def f():\n    from ray import train",
        "services.trainer.loop imports ray",
    ),
    (
        rules.neuron_is_imported_in_one_place,
        "services/compiler/trace.py",
        "import torch_neuronx.xla_impl",
        "services.compiler.trace imports torch_neuronx",
    ),
    (
        rules.the_tokenizer_never_imports_torch,
        "services/common/far.py",
        "import torch.nn",
        "services.common.far imports torch",
    ),
    (
        rules.the_tokenizer_never_imports_torch,
        "services/common/launch/inline.py",
        "import torch",
        "services.common.launch.inline imports torch",
    ),
    (
        rules.production_imports_nothing_of_tests,
        "services/common/artifacts/store.py",
        "from services.common.testing import recipes",
        "services.common.artifacts.store imports services.common.testing.recipes",
    ),
    (
        rules.production_imports_nothing_of_tests,
        "services/trainer/loop.py",
        "from services.trainer.tests.builders import make_corpus",
        "services.trainer.loop imports services.trainer.tests.builders.make_corpus",
    ),
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
        rules.one_function_joins_paths_of_manifests,
        "services/trainer/loop.py",
        "def f(run):\n    return run.checkpoint.path / WEIGHTS",
        "services.trainer.loop: run.checkpoint.path / WEIGHTS; use",
    ),
    (
        rules.one_function_joins_paths_of_manifests,
        "services/trainer/loop.py",
        "def f(folder, manifest):\n    return [folder / entry.path for entry in manifest.files]",
        "services.trainer.loop: folder / entry.path; use",
    ),
    *(
        (
            rules.supplied_files_are_opened_in_one_way,
            "services/trainer/loop.py",
            f"def f(path):\n    return {call}",
            f"services.trainer.loop: {call}; use services.common.input.files",
        )
        for call in (
            *("path.read_text()", "path.open('rb')", "open(path)", "os.open(path, os.O_RDONLY)"),
            *("torch.load(path)", "safetensors.safe_open(path, 'pt')", "pa.memory_map(path)", "fsspec.open(path)"),
        )
    ),
    (rules.services_is_no_package, "services/__init__.py", "", "services/__init__.py"),
    (
        rules.services_have_their_papers,
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
    """A small repository that keeps all rules; the tokenizer reaches services.common.far through another module."""
    files = {
        "services/common/requirements.txt": "numpy>=2\n",
        "services/common/far.py": "import numpy",
        "services/common/near.py": "from services.common.far import something",
        "services/common/launch/launcher.py": "",
        "services/common/launch/inline.py": "",
        "services/common/launch/ray_launcher.py": "import ray",
        "services/tokenizer/__main__.py": "import services.common.near\nimport services.common.launch.launcher",
        "services/trainer/loop.py": "from services.common.launch.launcher import choose_launcher\nimport torch",
        "deploy/history.py": "from services.common.near import something",
        "k8s/objects/api.py": "import kubernetes\nfrom deploy import history",
        "k8s/controller/reaper.py": "from k8s.objects.api import Api",
        "k8s/client/commands.py": "import images.versions, infra.shapes\nfrom k8s.objects.api import Api",
        "infra/shapes.py": "from services.common.near import something",
        "infra/cost.py": "import images.platforms\nfrom infra.shapes import find_shape",
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


def heavy_imports_after(module: str) -> list[str]:
    """Which of the libraries that take long to import a process has after importing `module`, and its threads."""
    program = (
        f"import sys, threading, {module}; "
        "print(*sorted({'torch', 'ray', 'pyarrow', 'pandas', 'datasets', 'transformers', 'sentencepiece', 'numba'}"
        " & set(sys.modules)), *[each.name for each in threading.enumerate()[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule: Rule) -> None:
    assert rule(REPOSITORY) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_house_that_keeps_the_rules_is_not_accused(repository: Path, rule: Rule) -> None:
    assert rule(repository) == []


@pytest.mark.parametrize(
    ("rule", "file", "content", "reported"), BREACHES, ids=lambda part: getattr(part, "__name__", "")
)
def test_a_broken_rule_is_noticed(repository: Path, rule: Rule, file: str, content: str, reported: str) -> None:
    write(repository / file, content)

    assert any(reported in problem for problem in rule(repository))


def test_every_rule_has_a_test_that_breaks_it() -> None:
    assert {rule for rule, *_ in BREACHES} == set(RULES)


def test_the_rules_look_at_all_services() -> None:
    services = {module.split(".")[1] for module in modules_of(REPOSITORY)}

    assert services == {"common", *rules.STAGES}


@pytest.mark.parametrize(
    "module",
    [
        "services.common.recipe.schema",
        "services.common.recipe.file",
        "services.common.errors",
        "services.common.process.telemetry",
        "services.common.process.command_line",
        "services.common.artifacts.store",
        "services.common.launch.launcher",
    ],
)
def test_importing_a_contract_is_light(module: str) -> None:
    assert heavy_imports_after(module) == []


def test_a_heavy_import_would_be_noticed() -> None:
    assert heavy_imports_after("services.common.artifacts.corpus") == ["pyarrow"]


def recipes() -> Iterator[Path]:
    yield from sorted((REPOSITORY / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", list(recipes()), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_under_its_own_name(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_recipes_are_shipped() -> None:
    assert "tiny-cpu" in [path.stem for path in recipes()]
