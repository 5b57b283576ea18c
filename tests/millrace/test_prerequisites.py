"""./prerequisites.sh names what a machine lacks, and the command of its system that installs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from images.platforms import REPOSITORY

DOCKER = "Docker with an engine that answers this user"
PYTHON = "Python 3.11 to 3.14 with its headers"
PANTS = "the pants launcher or Python 3.9, which builds images"
SCRIPTS = ("prerequisites.sh", "bootstrap", "pants", "pants.toml", "lockfiles/uv.txt")
USES = {
    "local": {"make", "git", "a C++ compiler", PYTHON},
    "images": {DOCKER, "skopeo", PANTS},
    "kubernetes": {"kubectl", "helm 3.13 or newer"},
    "aws": {"Terraform 1.10 or newer", "the AWS CLI"},
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH with what the scripts themselves run, and nothing that Millrace needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "env", "grep", "head", "id", "sed", "tail"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name in SCRIPTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return folder


def add(programs: Path, name: str, *lines: str) -> None:
    (programs / name).write_text("\n".join(["#!/usr/bin/env bash", *lines]), encoding="utf-8")
    (programs / name).chmod(0o755)


def check(programs: Path, *words: str, kernel: str = "Linux", release: str = "ID=debian") -> tuple[int, dict[str, str]]:
    """Return the exit code, and the commands by what is missing."""
    add(programs, "uname", f'[[ "$1" == -m ]] && echo x86_64 || echo {kernel}')
    (programs / "os-release").write_text(release, encoding="utf-8")
    done = subprocess.run(
        ["./prerequisites.sh", *words],
        cwd=programs.parent,
        env={"PATH": str(programs), "OS_RELEASE": str(programs / "os-release"), "HOME": str(programs.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    blocks = done.stdout.split("missing, for ")[1:]
    return done.returncode, dict(block.split(": ", 1)[1].rstrip().split("\n    ", 1) for block in blocks)


@pytest.mark.parametrize(
    ("kernel", "release", "installer"),
    [
        ("Linux", 'NAME="Amazon Linux"\nID="amzn"\nID_LIKE="fedora"', "dnf install -y "),
        ("Linux", "ID=debian", "apt-get install -y "),
        ("Linux", "ID=ubuntu\nID_LIKE=debian", "apt-get install -y "),
        ("Darwin", "", "brew install "),
    ],
    ids=["amazon", "debian", "ubuntu", "macos"],
)
def test_a_bare_machine_is_told_how_to_get_everything(
    programs: Path, kernel: str, release: str, installer: str
) -> None:
    exit_code, missing = check(programs, kernel=kernel, release=release)
    assert (exit_code, {*missing}) == (4, set.union(*USES.values()))
    assert installer in missing[PYTHON]
    assert installer in missing["skopeo"]
    for command in missing.values():
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    assert {*check(programs, "images", "aws", kernel=kernel, release=release)[1]} == USES["images"] | USES["aws"]


@pytest.mark.parametrize(
    ("use", "name", "answers", "place", "found"),
    [
        ("images", DOCKER, '[[ "$1" == --version ]]', "bin/docker", False),
        ("images", DOCKER, '[[ "$1" == version ]]', "bin/docker", True),
        ("images", PANTS, '[[ "$3" == *"(3, 9)"* ]]', "bin/python3", True),
        ("images", PANTS, '[[ "$3" == *"(3, 9)"* ]]', ".pyenv/versions/3.9.18/bin/python", True),
        ("images", PANTS, "exit 1", "bin/python3.9", False),
        ("local", PYTHON, "printf '3.12.1\\t%s\\t' $0", ".pyenv/versions/3.12.1/bin/python", True),
        ("local", PYTHON, "printf '3.12.1\\t%s\\theaders' $0", "bin/python3.12", False),
    ],
    ids=[
        *("Docker without an engine", "Docker", "python3 is 3.9", "pyenv's 3.9", "a shim of 3.9"),
        *("pyenv's 3.12", "3.12 without headers"),
    ],
)
def test_a_program_is_looked_for_as_by_the_command_that_runs_it(
    programs: Path, use: str, name: str, answers: str, place: str, found: bool
) -> None:
    """Docker's program may have no engine, and `python3` is a Python 3.9 on Amazon Linux 2023."""
    path = programs.parent / place
    path.parent.mkdir(parents=True, exist_ok=True)
    add(path.parent, path.name, answers)
    assert (name not in check(programs, use, release="ID=amzn")[1]) == found


@pytest.mark.parametrize(
    ("name", "printed", "is_enough"),
    [
        ("terraform", "Terraform v1.9.8", False),
        ("terraform", "Terraform v1.10.0", True),
        ("terraform", "Terraform v2.0.0", True),
        ("helm", "v3.12.3+g3a31588", False),
        ("helm", "v3.19.0+g3d8990f", True),
    ],
)
def test_an_old_program_counts_as_missing(programs: Path, name: str, printed: str, is_enough: bool) -> None:
    add(programs, name, f"echo {printed}")
    missing = check(programs, "kubernetes", "aws")[1]
    assert any(each.startswith((name, name.capitalize())) for each in missing) != is_enough


def test_install_runs_the_command_and_looks_again(programs: Path) -> None:
    add(programs, "sudo", '"$@"')
    add(programs, "apt-get", f'[[ "$1" == update ]] || echo "#!/usr/bin/env bash" >{programs}/docker')
    add(programs, "chmod")
    add(programs, "systemctl")
    add(programs, "skopeo")
    add(programs, "pants")
    assert check(programs, "--install", "images")[0] == 4, "what was installed does not run"
    (programs / "docker").chmod(0o755)
    assert check(programs, "--install", "images")[0] == 0


def test_a_machine_that_has_everything_ends_with_0(programs: Path) -> None:
    for name, printed in (
        ("docker", "Docker version 28"),
        ("skopeo", "skopeo version 1.9"),
        ("pants", "2.17.1"),
        ("kubectl", "v1.34"),
        ("helm", "v3.19.0"),
    ):
        add(programs, name, f"echo {printed}")
    assert check(programs, "images", "kubernetes") == (0, {})
    assert check(programs, "kubernets")[0] == 2
