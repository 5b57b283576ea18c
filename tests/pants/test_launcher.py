"""`./pants` finds the launcher or a Python 3.9, and never uses half of an installation.

The programs that it runs are small scripts here: nothing is downloaded.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# A Python 3.9 as far as ./pants can tell. Its venv holds a pip that installs nothing, a pex and a pants.
PYTHON = """
case "$*" in
*"-m venv"*)
    mkdir -p "${!#}/bin"
    cp "$0" "${!#}/bin/python"
    cp "$PANTS" "${!#}/bin/pants"
    cp "$PANTS" "${!#}/bin/pex"
    chmod +x "${!#}"/bin/*
    ;;
*"-m pip"*freeze*) echo pex==1.2.3 ;;
*pathlib*) echo "['known']" ;;
esac
"""
PANTS = """
echo "$0 $*"
echo "configured by ${PANTS_CONFIG_FILES:-pants.toml alone}"
echo "images $IMAGE_SETTINGS, PEX ${PANTS_PEX_CLI_KNOWN_VERSIONS:-}, packages ${PANTS_PYTHON_REPOS_INDEXES:-}"
echo "build arguments $PANTS_DOCKER_BUILD_ARGS"
"""
BOOTSTRAP = "echo 'trainer-cpu 1.0-cpu 1.0-gabc-cpu SERVICE=`touch made`'"
PROGRAMS = ("bash", "cat", "chmod", "cp", "dirname", "grep", "head", "mkdir", "mv", "rm", "sed", "tail", "touch")
SHIM = "echo 'pyenv: python3.9: command not found' >&2; exit 127"


class Checkout:
    """A repository with ./pants and little else, on a machine with few programs."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self.path = folder / "bin"
        self.pyenv = folder / "pyenv"
        self.python = self.pyenv / "versions/3.9.18/bin/python"
        self.repository.mkdir()
        self.path.mkdir()
        for name in ("pants", "pants.toml"):
            shutil.copy(REPOSITORY / name, self.repository / name)
        write_script(self.repository / "bootstrap", BOOTSTRAP)
        write_script(folder / "pants", PANTS)
        for name in PROGRAMS:
            (self.path / name).symlink_to(shutil.which(name) or name)
        self.environment = {
            "PATH": str(self.path),
            "HOME": str(folder),
            "PYENV_ROOT": str(self.pyenv),
            "PANTS": str(folder / "pants"),
        }

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.path / "bash"), "./pants", *arguments]
        return subprocess.run(
            command,
            cwd=self.repository,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_without_python_3_9_it_says_what_is_missing_and_what_works(checkout: Checkout) -> None:
    done = checkout.run("test", "::")

    assert done.returncode == 4
    assert "no Python 3.9" in done.stderr
    assert "make test" in done.stderr
    assert not (checkout.repository / ".pants-bootstrap").exists()


def test_the_python_3_9_that_runs_is_found_behind_one_that_does_not(checkout: Checkout) -> None:
    write_script(checkout.path / "python3.9", SHIM)
    write_script(checkout.python, PYTHON)

    done = checkout.run("test", "::")

    assert done.returncode == 0, done.stderr
    assert str(checkout.python) in done.stderr
    assert ".pants-bootstrap/bin/pants test ::" in done.stdout
    assert "configured by pants.offline.toml" in done.stdout
    assert "PEX ['known']" in done.stdout


def test_the_launcher_on_path_is_preferred_and_sees_what_the_images_are_built_from(checkout: Checkout) -> None:
    write_script(checkout.python, PYTHON)
    write_script(checkout.path / "pants", PANTS)

    done = checkout.run("list", PIP_INDEX_URL="https://one/simple", PIP_EXTRA_INDEX_URL="https://two https://three")

    assert done.stdout.startswith(f"{checkout.path}/pants list")
    assert "configured by pants.toml alone" in done.stdout
    assert "images trainer-cpu 1.0-cpu 1.0-gabc-cpu SERVICE=`touch made`" in done.stdout
    assert not (checkout.repository / "made").exists()
    assert "packages ['https://one/simple', 'https://two', 'https://three', ]" in done.stdout
    assert "build arguments ['PIP_INDEX_URL', 'PIP_EXTRA_INDEX_URL', ]" in done.stdout
