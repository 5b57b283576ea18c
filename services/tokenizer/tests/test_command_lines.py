"""Help and wrong command lines: each command shows its own options."""

from __future__ import annotations

import pytest

from services.tokenizer.__main__ import main
from services.tokenizer.tests.builders import Tool


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspekt", "."], ["'inspekt'", "Usage: python -m services.tokenizer"]),
        (["pin"], ["RECIPE", "Usage: python -m services.tokenizer pin"]),
        (
            ["train-vocab", "--output", "a.model", "x"],
            ["--vocab-size", "Usage: python -m services.tokenizer train-vocab"],
        ),
        (["--launch", "inline"], ["--recipe", "Usage: python -m services.tokenizer"]),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_the_usage(tool: Tool, arguments: list[str], expected: list[str]) -> None:
    result = tool(*arguments)

    assert result.exit_code == 2
    assert all(part in result.errors for part in expected), result.errors


@pytest.mark.parametrize(
    ("command", "own", "others"),
    [
        ([], ["--recipe FILE", "--dry-run", "--train.max_steps=500", "  train-vocab ", "  pin "], ["--vocab-size"]),
        (["train-vocab"], ["SOURCE...", "--output FILE", "--vocab-size N"], ["--recipe", "--root", "--launch"]),
        (["pin"], ["RECIPE"], ["--recipe", "--root", "--vocab-size"]),
    ],
)
def test_help_of_a_command_has_its_own_options(
    capsys: pytest.CaptureFixture[str], command: list[str], own: list[str], others: list[str]
) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in own), shown
    assert not any(part in shown for part in others), shown
