"""An installed wheel: one import root, beside whose commands and API a person's own folder `services` stays theirs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from images.platforms import REPOSITORY
from tests.small import write_notes, write_small_recipe

SOURCES = (
    *("millrace", "services", "deploy", "k8s", "infra", "images", "recipes"),
    *("pyproject.toml", "setup.py", "LICENSE", "README.md", "requirements-dev.txt"),
)
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
ADVICE = "import millrace.programs as programs; print(programs.advise_install('trainer'))"
NOTEBOOK = """
import services
import millrace
from torch.utils.data import DataLoader

if __name__ == "__main__":
    recipe = millrace.load_recipe("small.toml", {"train.max_steps": 3})
    corpus = millrace.open_corpus(recipe, "fsx")
    for context in ("fork", "spawn"):
        inputs, targets = next(iter(DataLoader(corpus, 2, num_workers=1, multiprocessing_context=context)))
    model, tokenizer = millrace.load_checkpoint("small", "fsx")
    assert model(inputs).logits.shape[:2] == targets.shape
    try:
        millrace.load_checkpoint("another", "fsx")
    except millrace.RecipeError:
        print(services.MINE, tokenizer is not None)
"""


def call(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel of this checkout. Other libraries are those of this environment."""
    pytest.importorskip("ensurepip")
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".terraform")
            shutil.copytree(REPOSITORY / name, folder / "source" / name, ignore=ignored)
        else:
            shutil.copy(REPOSITORY / name, folder / "source")
    wheel = folder / "source/dist" / call(sys.executable, "-c", BUILD, cwd=folder / "source").splitlines()[-1]
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    call(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    shutil.rmtree(folder / "source/services")
    return python


@pytest.fixture(scope="module")
def packages(python: Path) -> Path:
    """The environment's folder of packages."""
    return next(python.parents[1].glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def place(python: Path, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a notebook, a recipe, a corpus, and a package `services` of the person's own."""
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    place = tmp_path_factory.mktemp("place")
    (place / "services").mkdir()
    (place / "services/__init__.py").write_text("MINE = 'mine'")
    (place / "notebook.py").write_text(NOTEBOOK)
    write_small_recipe(place / "small.toml", str(write_notes(place / "notes")))
    call(python.with_name("millrace"), "tokenize", "small.toml", cwd=place)
    return place


@pytest.mark.usefixtures("place")
def test_a_wheel_has_one_import_root_and_tells_where_extras_come_from(python: Path, packages: Path) -> None:
    [record] = packages.glob("millrace-*.dist-info/RECORD")
    roots = {line.partition("/")[0] for line in record.read_text().splitlines()} - {record.parent.name, ".."}
    assert roots == {"millrace"}
    assert not list(packages.glob("millrace/**/tests"))
    advice = call(python, "-c", ADVICE, cwd=packages)
    call(*shlex.split(advice), "--no-index", "--no-deps", "--dry-run", cwd=packages)
    assert "millrace[trainer] @ file:///" in advice


@pytest.mark.parametrize("launch", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_commands_and_their_workers_leave_a_person_s_services_alone(python: Path, place: Path, launch: str) -> None:
    steps = {"inline": 2, "ray": 4}[launch]
    options = (f"--launch={launch}", f"--train.max_steps={steps}", "--compile.enabled=false")
    printed = call(python.with_name("millrace"), "train", "small.toml", *options, cwd=place)
    assert f"trained to step {steps}" in printed


def test_a_notebook_imports_its_own_services_beside_the_api(python: Path, place: Path) -> None:
    call(
        python.with_name("millrace"), "train", "small.toml", "--train.max_steps=2", "--compile.enabled=false", cwd=place
    )
    assert call(python, "notebook.py", cwd=place).splitlines()[-1] == "mine True"
