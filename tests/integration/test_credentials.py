"""Every command that reads a recipe refuses one with a password, and neither prints nor writes the password."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.batch.config import read_config
from deploy.client.requested_recipe import read_requested_recipe
from images.build import repository_of
from k8s.client.settings_env import CONFIG_MAP, fill_in
from services.common.errors import RecipeError
from services.common.program.backends.inductor_facts import inductor_facts
from tests.command import call
from tests.small import write_notes, write_small_recipe

MARKER = "MARKER4711"
ADDRESS = f"https://user:{MARKER}@host/a.jsonl?token={MARKER}"
COMMANDS = [
    ("tokenizer", ()),
    ("tokenizer", ("--dry-run",)),
    ("compiler", ("--dry-run",)),
    ("trainer", ("--dry-run",)),
    ("trainer", ("plan",)),
    ("trainer", ("doctor",)),
    ("trainer", ("report",)),
]


@pytest.fixture
def recipes(tmp_path: Path) -> tuple[Path, Path]:
    """Write a good recipe, and one whose source has a password."""
    notes = write_notes(tmp_path / "notes")
    return write_small_recipe(tmp_path / "good.toml", str(notes)), write_small_recipe(tmp_path / "bad.toml", ADDRESS)


@pytest.mark.parametrize(("stage", "arguments"), COMMANDS)
def test_every_command_refuses_a_password_in_its_recipe_or_options(
    recipes: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    stage: str,
    arguments: tuple[str, ...],
) -> None:
    good, bad = recipes
    root = str(tmp_path / "fsx")
    for recipe, options in (
        (bad, ()),
        (good, (f"--tokenizer.model={ADDRESS}",)),
        (good, (f"--corpus.sources=[{{ uri = {ADDRESS} }}]",)),
        (good, (f"--train.no_such_key={ADDRESS}",)),
    ):
        done = call(capfd, f"services.{stage}.__main__", *arguments, "--recipe", str(recipe), "--root", root, *options)
        assert done.returncode == 2
        assert ".netrc" in done.stderr
        assert MARKER not in done.stdout + done.stderr
    assert not (tmp_path / "fsx").exists()


def test_a_deployment_refuses_a_password_in_its_recipe_and_arguments(
    recipes: tuple[Path, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bad = recipes
    with pytest.raises(RecipeError) as caught:
        read_requested_recipe(bad)
    assert MARKER not in str(caught.value)
    for name, value in {"TARGET": "batch", "STAGE": "trainer", "ARGS": f"--tokenizer.model={ADDRESS}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["deploy", "deploy-stage"])
    done = call(capfd, "deploy.commands.__main__", "deploy-stage")
    assert done.returncode == 2
    assert "ARGS" in done.stderr
    assert MARKER not in done.stderr


def test_settings_of_images_and_accounts_with_a_password_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY", f"user:{MARKER}@registry.example.com")
    (tmp_path / "config.txt").write_text(f"ECR_REPO=https://user:{MARKER}@registry.example.com\n", encoding="utf-8")
    settings = {"kind": "ConfigMap", "metadata": {"name": CONFIG_MAP}, "data": {"REGISTRY": f"user:{MARKER}@host"}}
    for read in (
        lambda: repository_of("trainer"),
        lambda: read_config(tmp_path / "config.txt"),
        lambda: fill_in([settings]),
    ):
        with pytest.raises(RecipeError, match="password") as caught:
            read()
        assert MARKER not in str(caught.value)


def test_variables_that_hold_a_secret_are_no_part_of_what_is_stored_of_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_REDIS_PASSWORD", MARKER)
    monkeypatch.setenv("MKL_PROXY", f"http://user:{MARKER}@proxy:3128")
    monkeypatch.setenv("MKL_DEBUG", "1")
    facts = inductor_facts(is_compiled=False)
    assert MARKER not in str(facts)
    assert facts["environment"]["MKL_DEBUG"] == "1"
