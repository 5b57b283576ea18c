"""Pants gives pytest one file at a time, and takes "no tests ran" for a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

OK, NO_TESTS_RAN = 0, 5


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        ("services/tokenizer/tests/test_memory.py", OK),
        # A selection without a test is an error.
        ("services/tokenizer/tests/test_memory.py -k nothing", NO_TESTS_RAN),
        ("services/tokenizer/tests/test_memory.py -m cluster", NO_TESTS_RAN),
        ("services/tokenizer/tests/builders.py", NO_TESTS_RAN),
    ],
)
def test_a_file_of_slow_tests_alone_passes_where_they_are_left_out(arguments: str, exit_code: int) -> None:
    command = [sys.executable, "-m", "pytest", "--quiet", *arguments.split()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.returncode == exit_code, done.stdout


def test_a_file_that_lacks_a_library_passes(tmp_path: Path) -> None:
    """The tests on Ray Train skip so in a service's environment without torch."""
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\npytest.importorskip('no_such_library')\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--quiet", f"--rootdir={REPOSITORY}", "-c", "pyproject.toml"]
    # The root's conftest.py applies only below its folder, so it is named.
    done = subprocess.run(
        [*command, "-p", "conftest", str(test)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert done.returncode == OK, done.stdout
