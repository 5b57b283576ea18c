"""The command `millrace`: what it starts, with which words, and that its help needs no heavy library."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

import millrace
from docs.site.commands import list_commands
from images.platforms import REPOSITORY, SERVICES
from millrace.programs import DEPLOY_PROGRAMS, PROGRAMS, Call, Program, require_installed
from services.common.errors import shell_command
from services.common.process.subcommands import ARTIFACTS
from services.common.recipe.schema import STAGES
from services.common.testing.commands import run_python

COMMANDS: dict[str, Program] = {name: each for group in PROGRAMS.values() for name, each in group.items()}
TINY = str(REPOSITORY / "recipes/tiny-cpu.toml")
HEAVY = {"torch", "ray", "pyarrow", "numpy", "transformers", "numba", "pydantic", "boto3", "kubernetes"}


def call(line: str) -> Call:
    name, *words = shlex.split(line)
    program = DEPLOY_PROGRAMS[words.pop(0)] if name == "deploy" else COMMANDS[name]
    return program.call(words)


@pytest.mark.parametrize(
    ("line", "started"),
    [
        ("tokenize tiny-cpu", f"python -m services.tokenizer --recipe {TINY}"),
        (
            "compile recipes/mine.toml --root /data",
            "python -m services.compiler --recipe recipes/mine.toml --root /data",
        ),
        ("train tiny-cpu.toml --train.max_steps=5", f"python -m services.trainer --recipe {TINY} --train.max_steps=5"),
        ("train --recipe a.toml", "python -m services.trainer --recipe a.toml"),
        ("export tiny --output b", "python -m services.trainer export tiny --output b"),
        ("runs --json", "python -m services.trainer runs --json"),
        ("compare a b", "python -m services.trainer compare a b"),
        ("pin tiny-cpu a.toml", f"python -m services.tokenizer pin {TINY} a.toml"),
        ("artifacts verify fsx", "python -m services.common.artifacts verify fsx"),
        ("demo", f"python -m deploy.commands demo --recipe {TINY}"),
        ("demo a.toml --root /data", "python -m deploy.commands demo --recipe a.toml --root /data"),
        ("deploy status --target batch", "python -m deploy.commands stage-status --target batch"),
        (
            "deploy stage trainer --nodes 2 --keep --train.max_steps=5 --no-follow --args --allow-changed-program",
            "python -m deploy.commands deploy-stage --stage trainer --nodes 2 --keep --no-follow "
            "--args '--allow-changed-program --train.max_steps=5'",
        ),
        (
            "deploy run trainer --command 'sample --seed 1'",
            "python -m deploy.commands stage-run --stage trainer --command 'sample --seed 1'",
        ),
        (
            "deploy stage trainer --name=lr1",
            "python -m deploy.commands deploy-stage --stage trainer --args --name=lr1",
        ),
        ("deploy stop trainer --help", "python -m deploy.commands stop-stage --stage trainer --help"),
    ],
)
def test_a_command_starts_a_program_with_its_words(line: str, started: str) -> None:
    assert str(call(line)) == started


def test_every_subcommand_of_every_stage_has_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name it where it is installed, and the program elsewhere."""
    programs = {(each.module, " ".join(each.words)) for each in COMMANDS.values()}
    stages = {(each.module, each.subcommand) for each in list_commands() if each.module.startswith("services.")}
    shared = {each for each in stages if each[0].startswith("services.common.")}
    assert stages - shared <= programs
    assert COMMANDS[ARTIFACTS].module == "services.common.artifacts"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    named = {each for each in stages if each[1] and each[0] != "services.common.hardware.image_platform"}
    assert all(shell_command(*each) == f"python -m {' '.join(each)}" for each in named)
    (tmp_path / "millrace").touch()
    for each in named:
        assert str(call(shell_command(*each).removeprefix("millrace "))) == f"python -m {' '.join(each)}"


def test_the_help_lists_every_command_and_imports_no_heavy_library() -> None:
    listing = "import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules)); import runpy; "
    run = "sys.argv = ['millrace', '--help']; runpy.run_module('millrace', run_name='__main__')"
    done = run_python(["-c", listing + run], COLUMNS="100")
    printed, _, modules = done.stdout.rpartition("MODULES")
    assert done.returncode == 0
    assert {each.split()[1] for each in printed.splitlines() if each.startswith("│")} >= {*COMMANDS, "deploy"}
    assert {each.partition(".")[0] for each in modules.split()} & HEAVY == set()


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["artifacts", "list", "."], 0),
        (["--help"], 0),
        (["trian"], 2),
        (["report", "no-such-run", "--root", "/no/such"], 2),
        (["deploy", "stage", "trainer", "--node", "2"], 2),
        (["artifacts", "show", "tests"], 3),
    ],
)
def test_an_exit_code_is_that_of_the_program(words: list[str], exit_code: int) -> None:
    assert run_python(["-m", "millrace", *words]).returncode == exit_code


@pytest.mark.parametrize(
    ("program", "services"),
    [
        ("millrace", SERVICES),
        ("millrace train tiny-cpu", SERVICES),
        *((f"services.{stage}", (stage,)) for stage in STAGES),
        ("services.trainer runs", ("trainer",)),
        *((name, SERVICES) for name in ("services.common.artifacts", "deploy.commands", "k8s.client")),
        *((name, SERVICES) for name in ("infra", "images", "services.common.hardware.image_platform")),
        *((f"k8s.controller.{name}", SERVICES) for name in ("job", "reaper", "one_off_nodes")),
    ],
)
def test_every_program_prints_its_version_as_artifacts_record_it(program: str, services: tuple[str, ...]) -> None:
    done = run_python(["-m", *program.split(), "--version"], MILLRACE_GIT_SHA="abc123", MILLRACE_IMAGE="a/b:c")
    versions = {each: (REPOSITORY / "services" / each / "VERSION").read_text().strip() for each in sorted(services)}
    printed = ", ".join(f"{service} {version}" for service, version in versions.items())
    assert (done.returncode, done.stdout) == (0, f"{printed}; commit abc123, image a/b:c\n")


@pytest.mark.parametrize(
    ("line", "exit_code"),
    [
        ("runs --root none", 3),
        ("compare a,b", 2),
        ("report no-such-run", 2),
        ("export tiny-cpu", 2),  # without --output
        ("plan no-such-recipe", 2),
        ("plan tiny-cpu --model.hiddn_size=3", 2),
        ("plan tiny-cpu --model.hidden_size=3", 2),
        ("plan tiny-cpu", 0),
        ("train tiny-cpu --max_steps=5", 2),
        ("train tiny-cpu --train.max_step=5", 2),
        ("train tiny-cpu --dry-run", 0),
        ("compile tiny-cpu --train.max_step=5", 2),
        ("tokenize tiny-cpu --train.max_step=5", 2),
        *((f"{name} --help", 0) for name in COMMANDS),
    ],
)
def test_an_answer_without_a_model_needs_no_torch(line: str, exit_code: int, tmp_path: Path) -> None:
    done = run_python(["-m", "millrace", *shlex.split(line)], PYTHONPROFILEIMPORTTIME="1", TMPDIR=str(tmp_path))
    assert done.returncode == exit_code, done.stdout
    imported = {each.rpartition("|")[2].strip().partition(".")[0] for each in done.stdout.splitlines()}
    assert "typer" in imported
    assert imported & {"torch", "transformers", "tokenizers", "safetensors", "numba", "ray"} == set()


@pytest.mark.parametrize(
    ("line", "extras"),
    [
        ("tokenize a.toml", "[tokenizer]"),
        ("compile a.toml", "[compiler]"),
        ("runs", "[trainer]"),
        ("demo", "[tokenizer,trainer]"),
        ("deploy status", "[deploy]"),
        ("deploy pipeline --target local", "[tokenizer,trainer]"),
        ("artifacts list", None),
    ],
)
def test_a_program_without_its_libraries_names_the_extras(
    line: str, extras: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `pip install -e .`: no library of a stage is found."""
    monkeypatch.setattr("millrace.programs.find_spec", lambda name: None)
    with pytest.raises(millrace.MillraceError) if extras else nullcontext() as raised:
        require_installed(call(line))
    assert raised is None or (raised.value.exit_code, f"{extras}'" in str(raised.value)) == (4, True)


def test_a_demo_that_ends_early_advises_the_command_that_began_it(tmp_path: Path) -> None:
    """Where no Makefile is."""
    words = ["demo", "tiny-cpu", "--model.vocab_size=300", "--root", str(tmp_path / "a root")]
    done = subprocess.run(
        [sys.executable, "-m", "millrace", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [advised] = re.findall(r"Continue with: (.*)", done.stderr)
    assert shlex.split(advised) == ["millrace", *words]


def test_the_package_names_a_command_that_exists_and_sources_of_its_extras() -> None:
    package = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    module, name = package["project"]["scripts"]["millrace"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    dynamic = package["tool"]["setuptools"]["dynamic"]
    extras = dynamic["optional-dependencies"]
    assert {*extras} == {"tokenizer", "compiler", "trainer", "deploy", "infra", "dev"}
    files = [each["file"] for each in (dynamic["version"], dynamic["dependencies"], *extras.values())]
    for file in (name for each in files for name in ([each] if isinstance(each, str) else each)):
        assert (REPOSITORY / file).is_file()


def test_importing_the_package_is_light() -> None:
    """The API's names are there before their libraries are imported."""
    code = "import sys, millrace; print(sorted({'torch', 'pydantic', 'transformers'} & set(sys.modules)))"
    done = run_python(["-c", code])
    assert ast.literal_eval(done.stdout) == []
