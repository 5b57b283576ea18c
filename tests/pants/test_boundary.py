"""Pants refuses imports across boundaries: a stage's resolve holds services.common and no other stage."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

STAGES = ("tokenizer", "compiler", "trainer")

pytestmark = pytest.mark.slow


def run_pants(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # No daemon: it would outlive the test.
    command = ["./pants", "--no-pantsd", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that git would commit, with the installed Pants."""
    version = run_pants(REPOSITORY, "--version")
    if version.returncode == 4:
        pytest.skip(version.stderr)
    copy = tmp_path_factory.mktemp("repository")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if name and (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    if (REPOSITORY / ".pants-bootstrap").exists():
        (copy / ".pants-bootstrap").symlink_to(REPOSITORY / ".pants-bootstrap")
    return copy


def test_what_is_here_crosses_no_boundary(copy: Path) -> None:
    done = run_pants(copy, "dependencies", *[f"services/{stage}/*.py" for stage in STAGES])

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "line", "module"),
    [
        ("services/trainer/loop.py", "from services.tokenizer import pack", "services.tokenizer.pack"),
        ("services/common/recipe/derived.py", "import services.trainer.loop", "services.trainer.loop"),
        # The import would bring torch.
        ("services/tokenizer/pack.py", "import services.common.program.step", "services.common.program.step"),
    ],
)
def test_an_import_across_a_boundary_is_refused(copy: Path, file: str, line: str, module: str) -> None:
    before = (copy / file).read_text(encoding="utf-8")
    (copy / file).write_text(f"{before}\n{line}\n", encoding="utf-8")
    done = run_pants(copy, "dependencies", file)
    (copy / file).write_text(before, encoding="utf-8")

    assert done.returncode != 0
    assert f"cannot infer owners for the following imports in the target {file}" in done.stderr
    assert f"* {module} " in done.stderr
