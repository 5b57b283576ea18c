"""`make check-security` names vulnerable pins, and takes no pin for safe that was not looked up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from images import vulnerabilities
from images.vulnerabilities import audit_locks
from services.common.errors import DeviceError, TryAgain

SAFE = {"name": "uv", "version": "0.13.8", "vulns": []}
VULNERABLE = {"name": "uv", "version": "0.1", "vulns": [{"id": "PYSEC-2024-1", "fix_versions": ["0.2"]}]}


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the report and the exit code of a stand-in for pip-audit."""
    program = tmp_path / "pip-audit"
    monkeypatch.setattr(vulnerabilities, "PIP_AUDIT", program)
    monkeypatch.setattr(vulnerabilities, "_is_reachable", lambda: True)

    def set_answer(exit_code: int, *pins: dict[str, Any]) -> None:
        report = tmp_path / "report"
        report.write_text(json.dumps({"dependencies": pins, "fixes": []}) if pins else "a traceback")
        program.write_text(f"#!/bin/sh\ncat {report}\nexit {exit_code}\n")
        program.chmod(0o755)

    return set_answer


@pytest.mark.parametrize(
    ("exit_code", "pins", "error", "said"),
    [
        (1, [SAFE, VULNERABLE], DeviceError, r"lockfiles/dev\.txt: uv 0\.1 .*PYSEC-2024-1.* 0\.2"),
        (0, [{"name": "uv", "skip_reason": "not found"}], TryAgain, None),
        (2, [SAFE], TryAgain, None),
        (0, [], TryAgain, None),
        (1, [], TryAgain, None),
    ],
)
def test_a_vulnerable_pin_is_named_and_one_that_was_not_looked_up_is_not_taken_for_safe(
    answer: Any, exit_code: int, pins: list[dict[str, Any]], error: type[Exception], said: str | None
) -> None:
    answer(exit_code, *pins)
    with pytest.raises(error, match=said):
        audit_locks()


def test_locks_without_a_vulnerable_pin_pass(answer: Any) -> None:
    answer(0, SAFE)
    audit_locks()


def test_without_a_network_it_says_that_nothing_was_looked_up(
    answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(1, VULNERABLE)
    monkeypatch.setattr(vulnerabilities, "_is_reachable", lambda: False)

    audit_locks()

    assert "left out" in capsys.readouterr().out
