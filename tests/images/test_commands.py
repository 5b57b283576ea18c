"""A command for an image that cannot be built names the missing part and the next command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from images.platforms import REPOSITORY
from tests.command import call
from tests.images.checkout import write


@pytest.mark.parametrize(
    ("command", "wrong", "code", "said"),
    [
        ("build", {"PATH": "/nowhere"}, 4, "apt-get install docker.io"),
        ("base", {"PATH": "/nowhere"}, 4, "apt-get install docker.io"),
        ("build", {"STAGE": "tokeniser"}, 2, "tokenizer, compiler, trainer"),
        ("sbom", {"STAGE": "tokeniser"}, 2, "tokenizer, compiler, trainer"),
        ("release", {"STAGE": "tokeniser"}, 2, "tokenizer, compiler, trainer"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    wrong: dict[str, str],
    code: int,
    said: str,
) -> None:
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    done = call(capfd, "images.__main__", command)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def install(lock: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the installer of a build. It installs nothing here, because this Python is not the pinned one."""
    pinned = {"PINNED_PYTHON": "3.11.99", "BASE": "python:3.11.99-slim"}
    command = ["sh", str(REPOSITORY / "images/install.sh"), lock]
    return subprocess.run(
        command, env={**os.environ, **pinned, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("variable", ["TORCH_INDEX_URL", "TORCH_FIND_LINKS"])
def test_an_image_for_gpus_takes_no_torch_from_elsewhere(variable: str) -> None:
    """Torch from another index lacks the lock's CUDA libraries, which a cpu image does not need."""
    refused = install("compiler-cuda.txt", **{variable: "https://example.com/cpu"})
    assert refused.returncode != 0
    assert variable in refused.stderr
    assert "3.11.99" not in refused.stderr

    for taken in (install("compiler-cpu.txt", **{variable: "https://example.com/cpu"}), install("compiler-cuda.txt")):
        assert "3.11.99" in taken.stderr


def bootstrap(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of ./bootstrap in `folder`, with the uv of this checkout."""
    (folder / "lockfiles").mkdir()
    for name in ("bootstrap", "lockfiles/dev.txt", "lockfiles/uv.txt"):
        shutil.copy(REPOSITORY / name, folder / name)
    if (REPOSITORY / ".uv").exists():
        (folder / ".uv").symlink_to(REPOSITORY / ".uv")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    environment = {**inherited, "UV_HTTP_RETRIES": "0", **variables}
    return subprocess.run(
        ["./bootstrap", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"TORCH_INDEX_URL": "http://someone:s3cret@127.0.0.1:1/cpu"}, "http://127.0.0.1:1/cpu cannot be read: "),
        ({"TORCH_FIND_LINKS": "."}, ". has no torch=="),
    ],
)
def test_a_place_without_torch_is_named_and_the_environment_stays(
    tmp_path: Path, variables: dict[str, str], place: str
) -> None:
    write(tmp_path / ".venv/kept", "")
    done = bootstrap(tmp_path, TORCH="cpu", **variables)
    assert done.returncode == 4, done.stderr
    for named in ("torch==2.13.0", place, "TORCH_INDEX_URL=", "TORCH_FIND_LINKS=", "make setup TORCH=locked"):
        assert named in done.stderr
    assert "s3cret" not in done.stderr
    assert (tmp_path / ".venv/kept").exists()


@pytest.mark.parametrize("kept", [".venv/kept", ".venv.before/kept"])
def test_an_environment_comes_back_where_setup_fails_or_was_killed(tmp_path: Path, kept: str) -> None:
    write(tmp_path / kept, "")
    done = bootstrap(tmp_path, TORCH="locked", UV_OFFLINE="1", UV_NO_CACHE="1")
    assert done.returncode == 4, done.stderr
    assert sorted(path.name for path in (tmp_path / ".venv").iterdir()) == ["kept"]
    assert not (tmp_path / ".venv.before").exists()


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, ""),
        ({"TORCH": "cpu"}, "https://download.pytorch.org/whl/cpu"),
        ({"TORCH": "cpu", "TORCH_INDEX_URL": "https://example.com/cpu"}, "https://example.com/cpu"),
        ({"TORCH": "cpu", "TORCH_FIND_LINKS": "/wheels"}, ""),
    ],
)
def test_the_images_take_torch_from_the_index_of_setup(tmp_path: Path, variables: dict[str, str], index: str) -> None:
    program = "import os; print(os.environ.get('TORCH_INDEX_URL', ''))"
    assert bootstrap(tmp_path, "python", "-c", program, **variables).stdout.strip() == index
