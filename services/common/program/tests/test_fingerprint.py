"""The digest of the source: which changes make another program, and which do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.program import fingerprint

STEP, BACKEND = "services.common.program.step", "services.common.program.backends.torch_native"
REDUCTION, OTHER_BACKEND = "reduction.py", "backends/other_device.py"


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that changes a file in a copy of the program and returns the copy's digest."""
    program = Path(fingerprint.__file__).parent
    copy = tmp_path / "program"
    shutil.copytree(program, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    monkeypatch.setattr(fingerprint, "__file__", str(copy / "fingerprint.py"))

    def change(file: str = "", old: str = "", new: str = "") -> str:
        if file:
            text = (copy / file).read_text(encoding="utf-8") if (copy / file).exists() else ""
            assert old in text
            (copy / file).write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")
        return fingerprint.source_digest(STEP, BACKEND)

    return change


def test_comments_docstrings_and_layout_keep_caches_warm(digest: Callable[..., str]) -> None:
    before = digest()

    assert digest(REDUCTION, '"""Return the sum, and', '"""Return their sum, and') == before
    assert digest(REDUCTION, "        size = 1\n", "        size = 1  # of one leaf\n\n") == before
    assert digest("step.py", "from torch import Tensor\n", "from torch import (\n    Tensor,\n)\n") == before


def test_another_statement_makes_another_program(digest: Callable[..., str]) -> None:
    assert digest() != digest(REDUCTION, "size *= 2", "size *= 4")


def test_a_file_that_the_step_imports_from_afar_counts(digest: Callable[..., str]) -> None:
    assert digest() != digest("backends/inductor.py", 'return "millrace-compile-counter"', 'return "another"')


def test_another_backend_and_what_no_step_imports_do_not_count(digest: Callable[..., str]) -> None:
    before = digest()

    assert digest(OTHER_BACKEND, "", "import torch\n") == before
    assert digest("backends/choice.py", "", "choice = 1\n") == before
    assert digest("fingerprint.py", "", "another = 1\n") == before


def test_a_program_without_its_source_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "fingerprint.pyc"))

    with pytest.raises(FileNotFoundError):
        fingerprint.source_digest(STEP, BACKEND)
