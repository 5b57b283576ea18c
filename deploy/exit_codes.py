"""What the end of a stage's command means, on any target: its exit code, and the line that says why."""

from __future__ import annotations

from services.common.errors import TryAgain

EXIT_AGAIN = TryAgain.exit_code

MESSAGE_CHARACTERS = 500


def find_error_line(message: str) -> str:
    """A stage's own error line where there is one, else the end of what was said."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("millrace: "):
            return " ".join(lines[number:]).removeprefix("millrace: ")[:MESSAGE_CHARACTERS]
    return (lines[-1] if lines else "no message")[-MESSAGE_CHARACTERS:]
