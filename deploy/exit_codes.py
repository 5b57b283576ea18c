"""Interprets the end of a stage's command on any target: its exit code, and the line of its log that says why."""

from __future__ import annotations

import re

from services.common.errors import TryAgain

EXIT_AGAIN = TryAgain.exit_code
MESSAGE_CHARACTERS = 500
ERROR_PREFIX = "millrace: "
CUT = " ..."
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# Lines of other processes, which Ray and loggers write between an error and the end of a log.
_FOREIGN_LINE = re.compile(r"\(\w+ pid=|\[?\d{4}-\d\d-\d\d[ T]|[IWEF]\d{4} ")


def resolve_exit_code(exit_code: int | None) -> int:
    """The exit code of a command; 75 where it has none, or a signal ended it, since it was lost with its node."""
    return exit_code if exit_code is not None and exit_code >= 0 else EXIT_AGAIN


def is_tried_again(exit_code: int) -> bool:
    """Whether a further attempt may help: only after exit code 75."""
    return exit_code == EXIT_AGAIN


def find_error_line(message: str) -> str:
    """The stage's own error message, or else the last line of its log; on one line, shortened after a word."""
    lines = [line for line in _ESCAPES.sub("", message).strip().splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith(ERROR_PREFIX):
            said = [lines[number].removeprefix(ERROR_PREFIX)]
            for line in lines[number + 1 :]:
                if _FOREIGN_LINE.match(line):
                    break
                said.append(line)
            return shorten_line(" ".join(said), MESSAGE_CHARACTERS)
    return shorten_line(lines[-1] if lines else "no message", MESSAGE_CHARACTERS)


def shorten_line(text: str, most_characters: int) -> str:
    """The text on one line, with single spaces. A text that is too long ends after a word, in ` ...`."""
    text = " ".join(text.split())
    if len(text) <= most_characters:
        return text
    begin = text[: most_characters - len(CUT) + 1]
    return (begin.rpartition(" ")[0] or begin[:-1]) + CUT
