"""The digest of the source: which changes make another program, and which do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common import source_code

STEP, BACKEND = "services.common.program.step", "services.common.program.backends.torch_native"
REDUCTION = "reduction.py"


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that changes a file in a copy of the program and returns the copy's digest."""
    copy = tmp_path / "services/common/program"
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(source_code.ROOT / "services/common/program", copy, ignore=ignored)
    monkeypatch.setattr(source_code, "ROOT", tmp_path)

    def change(file: str = "", old: str = "", new: str = "") -> str:
        if file:
            text = (copy / file).read_text(encoding="utf-8") if (copy / file).exists() else ""
            assert old in text
            (copy / file).write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")
        return source_code.digest_source(STEP, BACKEND, packages=("services.common.program.",))

    return change


@pytest.mark.parametrize(
    ("file", "old", "new", "is_same"),
    [
        (REDUCTION, '"""Return the sum, and', '"""Return their sum, and', True),
        (REDUCTION, "        size = 1\n", "        size = 1  # of one leaf\n\n", True),
        ("step.py", "from torch import Tensor\n", "from torch import (\n    Tensor,\n)\n", True),
        ("backends/other_device.py", "", "import torch\n", True),
        ("backends/choice.py", "", "choice = 1\n", True),
        ("fingerprint.py", "", "another = 1\n", True),
        (REDUCTION, "size *= 2", "size *= 4", False),
        ("backends/inductor.py", 'return "millrace-compile-counter"', 'return "another"', False),
    ],
    ids=["docstring", "comment", "layout", "other backend", "choice", "fingerprint", "statement", "imported from afar"],
)
def test_a_cache_stays_warm_unless_a_statement_of_the_step_changes(
    digest: Callable[..., str], file: str, old: str, new: str, is_same: bool
) -> None:
    assert (digest() == digest(file, old, new)) == is_same


def test_a_program_without_its_source_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_code, "ROOT", tmp_path)

    with pytest.raises(FileNotFoundError):
        source_code.digest_source(STEP, packages=())
