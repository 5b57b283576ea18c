"""The exit code of a stage's command means the same on every target."""

from __future__ import annotations

import pytest

from deploy.exit_codes import MESSAGE_CHARACTERS, find_error_line, resolve_exit_code


@pytest.mark.parametrize(("told", "expected"), [(0, 0), (3, 3), (75, 75), (None, 75), (-9, 75), (-15, 75)])
def test_a_command_that_told_no_code_was_lost(told: int | None, expected: int) -> None:
    assert resolve_exit_code(told) == expected


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "no message"),
        ("step 1\nkilled\n\n", "killed"),
        ("step 1\nmillrace: no corpus\n", "no corpus"),
        ("millrace: two keys:\n  a\n  b\n", "two keys: a b"),
        ("millrace: no\tdevice\x1b[0m \n(RayTrainWorker pid=7) bye\n[2026-11-23 09:00:00,1 E 7 7] gone\n", "no device"),
        ("Traceback\nValueError: a\tb", "ValueError: a b"),
        ("millrace: first\nmillrace: last", "last"),
    ],
)
def test_a_stage_s_own_line_is_found(said: str, line: str) -> None:
    assert find_error_line(said) == line


def test_a_line_that_is_too_long_ends_after_a_word() -> None:
    line = find_error_line("millrace: " + "word " * 1_000)
    assert len(line) <= MESSAGE_CHARACTERS
    assert line.endswith("word ...")
