"""`--dry-run` shows the run that a command would begin or continue, and its first step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.common.process.entry_point import exit_code_of
from services.trainer.__main__ import main
from services.trainer.job import RUN_FILE
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.runs import checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a root with 2 steps of its run."""
    folder = tmp_path_factory.mktemp("trained")
    make_corpus(folder / "fsx", make_recipe(folder))
    write_recipe(folder)
    assert train(folder, "--train.max_steps=2", "--checkpoint.interval_steps=2") == 0
    return folder


def train(folder: Path, *options: str) -> int:
    recipe = next(folder.glob("*.toml"))
    arguments = ["--recipe", str(recipe), "--root", str(folder / "fsx"), "--parallel.data_parallel_size=1", *options]
    return exit_code_of(lambda: main(["train", "--launch=inline", *arguments]))


def dry_run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """The rows of the table by name."""
    capsys.readouterr()
    assert train(folder, "--dry-run", *options) == 0
    table = capsys.readouterr().out.rpartition("\n}\n")[2]
    return dict(re.findall(r"^(\S+(?: \S+)*)  +(.*)$", table, re.MULTILINE))


def test_the_same_recipe_continues_its_run_and_a_longer_one_too(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [checkpoint] = checkpoints(trained / "fsx").values()
    run = checkpoint.parent.name

    complete = dry_run(trained, capsys, "--train.max_steps=2")
    assert (complete["run"], complete["begins at step"]) == (run, "none: the run is complete, 2 of 2")
    longer = dry_run(
        trained, capsys, "--train.max_steps=4000", "--checkpoint.interval_steps=7", "--compile.num_workers=3"
    )
    assert (longer["run"], longer["begins at step"]) == (run, f"2 of 4,000, from {checkpoint}")
    assert "differs from" not in longer


def test_another_learning_rate_is_said_to_be_a_new_run_and_what_differs(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [checkpoint] = checkpoints(trained / "fsx").values()
    before = json.loads((trained / "fsx/run" / checkpoint.parent.name / RUN_FILE).read_text())["recipe"]

    shown = dry_run(trained, capsys, "--optimizer.learning_rate=0.5", "--model.hidden_size=64")

    assert shown["run"] != checkpoint.parent.name
    assert shown["begins at step"].startswith("0 of ")
    assert shown["differs from"].startswith(f"{checkpoint.parent.name}: ")
    for key, now in (("optimizer.learning_rate", 0.5), ("model.hidden_size", 64)):
        section, name = key.split(".")
        assert f"{key} was {before[section][name]} and is {now}" in shown["differs from"]


def test_neither_a_missing_corpus_nor_a_damaged_run_is_an_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    shown = dry_run(tmp_path, capsys)
    assert "tokenizer" in shown["run"]  # the next command
    assert "begins at step" not in shown

    make_corpus(tmp_path / "fsx", recipe)
    damaged = tmp_path / "fsx/run" / f"{recipe.name}-01234567"
    damaged.mkdir(parents=True)
    (damaged / RUN_FILE).write_text("{")
    assert dry_run(tmp_path, capsys)["differs from"].startswith(damaged.name)


@pytest.mark.parametrize(("steps", "is_warned"), [(40, False), (41, True)])
def test_more_than_4_epochs_are_warned_of(
    trained: Path, capsys: pytest.CaptureFixture[str], steps: int, is_warned: bool
) -> None:
    """The corpus has 80 samples, and a step takes 8."""
    rows = dry_run(trained, capsys, f"--train.max_steps={steps}", f"--optimizer.decay_steps={steps}")
    assert rows["epochs in max_steps"] == f"{steps / 10:.2f}"
    assert ("step 40" in rows.get("warning, epochs", "")) == is_warned
