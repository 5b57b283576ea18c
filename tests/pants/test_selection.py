"""Pants gives pytest one file at a time, and takes "no tests ran" for a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

OK, NO_TESTS_RAN = 0, 5
SLOW_ALONE = "import pytest\n\n\n@pytest.mark.slow\ndef test_it() -> None: ...\n"
"""A file whose tests are all deselected by default."""
LACKS_A_LIBRARY = "import pytest\npytest.importorskip('no_such_library')\n"
"""A file that skips itself, as the tests on torch do in a service's environment without torch."""


@pytest.mark.parametrize(
    ("content", "options", "exit_code"),
    [
        (SLOW_ALONE, "", OK),
        (LACKS_A_LIBRARY, "", OK),
        # A selection by hand without a test is an error.
        (SLOW_ALONE, "-k nothing", NO_TESTS_RAN),
        (SLOW_ALONE, "-m cluster", NO_TESTS_RAN),
        ("", "", NO_TESTS_RAN),
    ],
    ids=["slow", "skipped", "-k", "-m", "empty"],
)
def test_a_file_passes_whose_tests_are_all_left_out_by_default(
    tmp_path: Path, content: str, options: str, exit_code: int
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(content, encoding="utf-8")
    # The root's conftest.py applies only below its folder, so it is named.
    command = [sys.executable, "-m", "pytest", "--quiet", f"--rootdir={REPOSITORY}", "-c", "pyproject.toml"]
    done = subprocess.run(
        [*command, "-p", "conftest", str(test), *options.split()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == exit_code, done.stdout
