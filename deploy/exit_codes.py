"""The exit codes of a stage's command, on any target: which is tried again, and which line says why it ended."""

from __future__ import annotations

from services.common.errors import TryAgain

EXIT_AGAIN = TryAgain.exit_code
MESSAGE_CHARACTERS = 500
ERROR_PREFIX = "millrace: "


def resolve_exit_code(exit_code: int | None) -> int:
    """A command without an exit code, or that a signal ended, was lost with its node: it is tried again."""
    return exit_code if exit_code is not None and exit_code >= 0 else EXIT_AGAIN


def is_tried_again(exit_code: int) -> bool:
    """No other code is: nothing that a further attempt meets would be different."""
    return exit_code == EXIT_AGAIN


def find_error_line(message: str) -> str:
    """A stage's own error line where there is one, else the end of what was said."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith(ERROR_PREFIX):
            return " ".join(lines[number:]).removeprefix(ERROR_PREFIX)[:MESSAGE_CHARACTERS]
    return (lines[-1] if lines else "no message")[-MESSAGE_CHARACTERS:]
