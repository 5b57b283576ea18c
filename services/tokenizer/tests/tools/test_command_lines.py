"""Command lines of the tools that are wrong, and help."""

from __future__ import annotations

import re

import pytest

from services.tokenizer.__main__ import main
from services.tokenizer.tests.tools.corpora import Tool


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspekt", "."], ["'inspekt': no such tool", "inspect, diff, train-vocab", "--recipe FILE"]),
        (["inspect"], ["DIR", "usage: python -m services.tokenizer inspect"]),
        (["inspect", ".", "--documents", "-1"], ["--documents -1", "usage"]),
        (["inspect", ".", "--split", "test"], ["--split", "validation"]),
        (["diff", "."], ["DIR", "usage: python -m services.tokenizer diff"]),
        (["--launch", "inline"], ["--recipe", "usage: python -m services.tokenizer"]),
    ],
)
def test_wrong_command_lines(tool: Tool, arguments: list[str], expected: list[str]) -> None:
    said = tool(*arguments)

    assert said.exit_code == 2
    assert all(part in said.errors for part in expected), said.errors


def test_help_of_the_stage_names_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out

    assert "--recipe FILE" in shown
    assert "--train.max_steps=500" in shown
    assert re.findall(r"^  (inspect|diff|train-vocab) +\w", shown, re.MULTILINE) == ["inspect", "diff", "train-vocab"]
