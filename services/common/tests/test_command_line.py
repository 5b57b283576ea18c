"""Command lines: options that commands share, recipe overrides, and the default command of a stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import RecipeError
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
from services.common.testing.recipes import write_recipe

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
    path = write_recipe(tmp_path)
    assert run(*name, "--recipe", str(path), "--train.max_steps=7", "--root=data") == 7
    found, _ = given.pop()
    assert (found.recipe.train.max_steps, found.recipe_path, found.root) == (7, path, Path.cwd() / "data")


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
    ("words", "usage"),
    [([], "trainer train"), (["rnus"], "trainer"), (["--dry-run"], "trainer train"), (["runs", "--x"], "trainer runs")],
)
def test_a_wrong_command_line_is_a_recipe_error_with_the_usage(words: list[str], usage: str) -> None:
    with pytest.raises(RecipeError, match=rf"\nUsage: python -m services\.{usage} \[OPTIONS\]"):
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
        ("head:6379", (), "ray"),
        ("head:6379", ("--launch=inline",), "inline"),
    ],
)
def test_a_command_uses_ray_where_ray_address_names_a_cluster_and_plain_processes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, options: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    run("--recipe", str(write_recipe(tmp_path)), *options)
    assert given.pop()[1] == expected
