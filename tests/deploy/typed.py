"""A deploy command as a person types it: its variables, and the request that its target gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import typer

from deploy.commands.__main__ import NAMED_IN_MAKE, VARIABLES, Given, app, main

COMMANDS: dict[str, list[str]] = {
    name: [str(each.envvar) for each in command.params]
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
"""The commands, and the variables of each."""


def run_command(command: str, variables: Mapping[str, str], *options: str) -> MagicMock:
    """Run the command with nothing but these variables set; its target, which does nothing and ends with 0."""
    target = MagicMock()
    for name in ("deploy", "roll_back", "run_pipeline", "run_one_off", "show_status", "show_log", "stop"):
        getattr(target, name).return_value = 0
    with pytest.MonkeyPatch.context() as environment, patch.object(Given, "connect", lambda given: target):
        for name in (*(option.envvar for _, option in VARIABLES.values()), NAMED_IN_MAKE):
            environment.delenv(name, raising=False)
        for name, value in variables.items():
            environment.setenv(name, value)
        assert main([command, *options]) == 0
    return target


def request_of(command: str, variables: Mapping[str, str], *options: str) -> Any:
    """The request that the target of the command gets."""
    target = run_command(command, variables, *options)
    [(_, arguments, _)] = target.method_calls
    return arguments[0]
