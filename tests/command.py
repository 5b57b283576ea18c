"""Calls commands in the test's process, for tests that neither kill them nor send signals."""

from __future__ import annotations

import importlib
import subprocess

import pytest

from services.common.process.entry_point import exit_code_of


def call(capfd: pytest.CaptureFixture[str], module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call `main` of a module, as `python -m MODULE ARGUMENTS` does."""
    main = importlib.import_module(module).main
    exit_code = exit_code_of(lambda: main(list(arguments)))
    printed = capfd.readouterr()
    return subprocess.CompletedProcess(arguments, exit_code, printed.out, printed.err)
