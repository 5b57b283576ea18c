"""A subcommand in a container of its own: what it is given, what it brings home, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import RecipeError
from services.common.launch.batch.node import ROOT_MARKER
from services.common.process import brought_files
from services.common.process.brought_files import (
    MOST_PACKED_BYTES,
    PART_CHARACTERS,
    FileReceiver,
    offer_file,
    pack_file,
)
from services.common.process.entry_point import exit_code_of
from services.common.process.one_off import run_one_off
from services.common.process.subcommands import SUBCOMMANDS, require_subcommand
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, pack_recipe
from services.common.testing.artifacts import publish
from services.common.testing.recipes import make_recipe, recipe_text
from services.common.tests.builders import REPOSITORY


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the test the environment of a one-off: a recipe, and a working directory until the test ends."""
    monkeypatch.setenv(RECIPE_VARIABLE, pack_recipe(recipe_text().encode()))
    monkeypatch.setattr(brought_files, "_offered", [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "fsx"
    folder.mkdir()
    return folder


def received(text: str) -> tuple[FileReceiver, list[str]]:
    """Return the files that were brought home, and the lines that a person sees."""
    receiver = FileReceiver()
    return receiver, [line for line in text.splitlines() if not receiver.take(line)]


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
    [
        (["exprt"], "'exprt' is no subcommand of the trainer, which has plan, .* Do you mean export?"),
        (["train"], "make deploy-stage STAGE=trainer"),
        (["--recipe", "x"], "'--recipe' is no subcommand"),
        (["batch", "--", "x"], "'batch' is no subcommand"),
        ([], "expected a subcommand after --"),
    ],
)
def test_what_is_no_subcommand_is_refused_before_it_begins(root: Path, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        run_one_off("trainer", lambda _: pytest.fail("it ran"), ["--root", str(root), "--", *words])


def test_without_the_shared_file_system_nothing_begins(root: Path) -> None:
    command = ["--root", str(root), "--require-mount", "--", "artifacts", "list", "."]
    assert exit_code_of(lambda: run_one_off("trainer", lambda _: pytest.fail("it ran"), command)) == 5
    (root / ROOT_MARKER).touch()
    assert exit_code_of(lambda: run_one_off("trainer", lambda _: 0, command)) == 0


def test_files_that_are_named_or_offered_come_home_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bytes(range(256)) * 1_000 + os.urandom(50_000)
    (root / "run").mkdir()
    (root / "notes.txt").write_bytes(b"")

    def run(words: list[str]) -> int:
        (root / "run/report.html").write_bytes(report)
        print("a line of the subcommand's own")
        offer_file(root / "run/report.html")
        return 0

    options = ["--root", str(root), "--bring", "notes.txt", "--bring", "run/report.html"]
    assert run_one_off("trainer", run, [*options, "--", "report"]) == 0
    said = capsys.readouterr().out
    receiver, lines = received(said)
    assert lines == ["a line of the subcommand's own"]
    assert max(map(len, said.splitlines())) < PART_CHARACTERS + 100
    files, problems = receiver.files()
    assert [(file.name, file.content) for file in files] == [("notes.txt", b""), ("report.html", report)]
    assert problems == []


def test_nothing_comes_home_of_a_subcommand_that_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "x").touch()
    assert run_one_off("trainer", lambda _: 3, ["--root", str(root), "--bring", "x", "--", "summary"]) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["absent", "folder", "large"])
def test_what_cannot_come_home_stays_and_is_named(root: Path, name: str) -> None:
    (root / "folder").mkdir()
    (root / "large").write_bytes(os.urandom(MOST_PACKED_BYTES + 1))
    with pytest.raises(RecipeError, match=f"fsx/{name}: "):
        run_one_off("trainer", lambda _: 0, ["--root", str(root), "--bring", name, "--", "summary"])


def test_lines_that_come_twice_late_or_never_are_noticed(tmp_path: Path) -> None:
    content = os.urandom(20_000)
    (tmp_path / "a.bin").write_bytes(content)
    lines = list(pack_file(tmp_path / "a.bin", 0))
    again = FileReceiver()
    for line in [*reversed(lines), lines[1]]:
        assert again.take(f"{line}\r\n")
    [file], problems = again.files()
    assert (file.content, problems) == (content, [])
    receiver, _ = received("\n".join(lines[:-1]))
    files, [problem] = receiver.files()
    assert (files, f"1 of {len(lines)} lines" in problem) == ([], True)
    damaged = [lines[0], lines[1][:-2] + "AA", *lines[2:]]
    files, [problem] = received("\n".join(damaged))[0].files()
    assert (files, "file 1 " in problem) == ([], True)


@pytest.mark.parametrize("name", ["../../.bashrc", ".profile", "/etc/passwd"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    class Named(type(tmp_path)):  # type: ignore[misc]
        name = ""

    (tmp_path / "a").write_bytes(b"x")
    path = Named(tmp_path / "a")
    Named.name = name
    files, [problem] = received("\n".join(pack_file(path, 0)))[0].files()
    assert files == []
    assert repr(name) in problem


def test_a_stage_s_own_program_runs_it(root: Path) -> None:
    """The tokenizer's program runs a subcommand as its container does."""
    made, _ = publish(root, make_recipe(root.parent))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.tokenizer", *words]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    here = ("one-off", "--root", str(root))
    listed = run(*here, "--bring", f"{made.path}/manifest.json", "--", "artifacts", "list", ".")
    assert listed.returncode == 0, listed.stderr
    receiver, lines = received(listed.stdout)
    assert made.manifest.schema_id in lines[0]
    assert receiver.files()[0][0].content == (made.path / "manifest.json").read_bytes()
    assert run("artifacts", "list", str(root)).stdout.count("\n") == 1
    refused = run(*here, "--", "artifact", "list", ".")
    assert (refused.returncode, "Do you mean artifacts?" in refused.stderr) == (2, True)


def test_every_stage_looks_at_artifacts() -> None:
    assert all(any(each.name == "artifacts" for each in of_stage) for of_stage in SUBCOMMANDS.values())
    with pytest.raises(RecipeError, match="'x' is no subcommand of the compiler, which has plan"):
        require_subcommand("compiler", "x", ["plan"])
