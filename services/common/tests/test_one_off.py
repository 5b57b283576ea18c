"""A subcommand in a container of its own: what it is given, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import RecipeError
from services.common.launch.batch.node import ROOT_MARKER
from services.common.process.entry_point import exit_code_of
from services.common.process.one_off import run_one_off
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, pack_recipe
from services.common.testing.artifacts import publish
from services.common.testing.recipes import make_recipe, recipe_text
from services.common.tests.builders import REPOSITORY


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the test the environment of a one-off: a recipe, and a working directory until the test ends."""
    monkeypatch.setenv(RECIPE_VARIABLE, pack_recipe(recipe_text().encode()))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "fsx"
    folder.mkdir()
    return folder


def test_a_subcommand_is_given_recipe_and_root_and_works_in_the_root(root: Path) -> None:
    seen: list[str] = []

    def run(words: list[str]) -> int:
        seen.extend(words)
        assert Path.cwd() == root
        assert Path(words[2]).read_text(encoding="utf-8") == recipe_text()
        return 3

    assert run_one_off("trainer", run, ["--root", str(root), "--", "export", "--output", "hf", "--train.seed=1"]) == 3
    assert [*seen[:2], *seen[3:]] == ["export", "--recipe", "--root", str(root), "--output", "hf", "--train.seed=1"]


def test_one_that_takes_no_recipe_gets_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECIPE_VARIABLE)
    seen: list[list[str]] = []
    command = ["--root", str(root), "--", "train-vocab", "notes"]

    def run(words: list[str]) -> int:
        seen.append(words)
        return 0

    run_one_off("tokenizer", run, command)
    assert seen == [["train-vocab", "notes"]]
    for words in (["runs"], ["compare", "--runs", "a,b"], ["report", "--run=a"]):
        run_one_off("trainer", run, ["--root", str(root), "--", *words])
        assert seen[-1] == [words[0], "--root", str(root), *words[1:]]
    with pytest.raises(RecipeError, match=RECIPE_VARIABLE):
        run_one_off("trainer", lambda words: 0, ["--root", str(root), "--", "summary"])


@pytest.mark.parametrize(
    ("words", "said"),
    [(["exprt"], "export?"), (["train"], "STAGE=trainer"), (["--recipe", "x"], "--recipe"), ([], "SUBCOMMAND")],
)
def test_what_is_no_subcommand_is_refused_before_it_begins(root: Path, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        run_one_off("trainer", lambda _: pytest.fail("it ran"), ["--root", str(root), "--", *words])


def test_without_the_shared_file_system_nothing_begins(root: Path) -> None:
    command = ["--root", str(root), "--require-mount", "--", "artifacts", "list", "."]
    assert exit_code_of(lambda: run_one_off("trainer", lambda _: pytest.fail("it ran"), command)) == 5
    (root / ROOT_MARKER).touch()
    assert exit_code_of(lambda: run_one_off("trainer", lambda _: 0, command)) == 0


def test_a_stage_s_own_program_runs_it(root: Path) -> None:
    """The tokenizer's program runs a subcommand as its container does."""
    made, _ = publish(root, make_recipe(root.parent))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.tokenizer", *words]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    listed = run("one-off", "--root", str(root), "--", "artifacts", "list", ".")
    assert listed.returncode == 0, listed.stderr
    assert made.manifest.schema_id in listed.stdout
    assert run("artifacts", "list", str(root)).stdout.count("\n") == 1
