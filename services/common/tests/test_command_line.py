"""Command lines: shared options, recipe overrides, default commands, and one-offs in containers of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import RecipeError, shell_command
from services.common.launch.batch.node import ROOT_MARKER
from services.common.process.command_line import (
    ROOT,
    Context,
    Given,
    Launch,
    MetricsPort,
    RecipeCommand,
    RecipePath,
    Root,
    StageGroup,
    make_app,
    read_given,
    run_app,
)
from services.common.process.entry_point import exit_code_of
from services.common.process.one_off import run_one_off
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, pack_recipe
from services.common.testing.artifacts import publish
from services.common.testing.commands import REPOSITORY
from services.common.testing.recipes import make_recipe, recipe_text, write_recipe

app = make_app(StageGroup)
given: list[tuple[Given, str]] = []


@app.command(cls=RecipeCommand)
def train(
    context: Context,
    recipe_path: RecipePath,
    root: Root = ROOT,
    launch: Launch = "",
    metrics_port: MetricsPort = None,
) -> int:
    """Train the model."""
    given.append((read_given(context, recipe_path, root), launch))
    return 7


@app.command()
def runs(root: Root = ROOT) -> int:
    """List the runs."""
    return 0


def run(*words: str) -> int:
    return run_app(app, list(words), "services.trainer")


@pytest.mark.parametrize("name", [[], ["train"]])
def test_the_command_line_overrides_the_recipe_of_the_default_command(tmp_path: Path, name: list[str]) -> None:
    path = write_recipe(tmp_path, train__time_limit_seconds=60)
    overrides = ("--train.max_steps=7", "--name=lr1", "--train.time_limit_seconds=null")
    assert run(*name, "--recipe", str(path), *overrides, "--root=data") == 7
    found, _ = given.pop()
    assert (found.recipe.train.max_steps, found.recipe_path, found.root) == (7, path, Path.cwd() / "data")
    assert (found.recipe.name, found.recipe.train.time_limit_seconds) == ("lr1", None)


@pytest.mark.parametrize(
    "words",
    [
        ["--train.max_steps"],
        ["train.max_steps=7"],
        ["--max_steps=7"],
        ["--rec=x"],
        ["--train.no_such_key=7"],
        ["--launch=slurm"],
        ["--metrics-port=99999"],
    ],
)
def test_a_wrong_word_is_a_recipe_error(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(RecipeError):
        run("--recipe", str(write_recipe(tmp_path)), *words)


@pytest.mark.parametrize(
    ("word", "override"),
    [
        ("--train.max_steps", "--train.max_steps=VALUE"),
        ("--max_steps=7", "--train.max_steps=7"),
        ("--num_workers", "--compile.num_workers=VALUE"),
        ("--no-such-option", "--section.key=VALUE"),
    ],
)
def test_a_word_that_may_be_meant_as_an_override_is_answered_with_it(tmp_path: Path, word: str, override: str) -> None:
    with pytest.raises(RecipeError, match=override):
        run("--recipe", str(write_recipe(tmp_path)), word)


TRAIN = shell_command("services.trainer", "train", "RECIPE")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ([], TRAIN),
        (["rnus"], "python -m services.trainer"),
        (["--dry-run"], TRAIN),
        (["runs", "--x"], shell_command("services.trainer", "runs")),
    ],
)
def test_a_wrong_command_line_is_a_recipe_error_with_the_usage(words: list[str], usage: str) -> None:
    with pytest.raises(RecipeError, match=rf"\nUsage: {usage} \[OPTIONS\]"):
        run(*words)


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        (["-h"], ["--recipe FILE", "--train.max_steps=500", "  runs "], []),
        (["runs", "--help"], ["--root DIR"], ["--recipe", "--launch"]),
    ],
)
def test_the_help_of_a_command_has_its_own_options(
    capsys: pytest.CaptureFixture[str], words: list[str], own: list[str], others: list[str]
) -> None:
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in own), shown
    assert not any(part in shown for part in others), shown


@pytest.mark.parametrize(
    ("address", "options", "expected"),
    [
        ("", (), "inline"),
        ("", ("--launch=ray",), "ray"),
        (" ", (), "inline"),
        ("head:6379", (), "ray"),
        ("[::1]:6379", (), "ray"),
        ("auto", (), "ray"),
        ("head:6379", ("--launch=inline",), "inline"),
    ],
)
def test_a_command_uses_ray_where_ray_address_names_a_cluster_and_plain_processes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, options: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    run("--recipe", str(write_recipe(tmp_path)), *options)
    assert given.pop()[1] == expected


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a subcommand in a container of its own, whose environment has the recipe."""
    monkeypatch.setenv(RECIPE_VARIABLE, pack_recipe(recipe_text().encode()))
    monkeypatch.chdir(tmp_path)  # back when the test ends, because the subcommand works in the root
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

    assert run_one_off("trainer", run, ["--root", str(root), "--", "import", "--from", "hf", "--train.seed=1"]) == 3
    assert [*seen[:2], *seen[3:]] == ["import", "--recipe", "--root", str(root), "--from", "hf", "--train.seed=1"]


def test_one_that_takes_no_recipe_gets_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECIPE_VARIABLE)
    seen: list[list[str]] = []
    command = ["--root", str(root), "--", "train-vocab", "notes"]

    def run(words: list[str]) -> int:
        seen.append(words)
        return 0

    run_one_off("tokenizer", run, command)
    assert seen == [["train-vocab", "notes"]]
    for words in (["runs"], ["compare", "a", "b"], ["report", "a"]):
        run_one_off("trainer", run, ["--root", str(root), "--", *words])
        assert seen[-1] == [words[0], "--root", str(root), *words[1:]]
    with pytest.raises(RecipeError, match=RECIPE_VARIABLE):
        run_one_off("trainer", lambda words: 0, ["--root", str(root), "--", "plan"])


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
