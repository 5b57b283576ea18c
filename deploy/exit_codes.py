"""The exit codes of a stage's command, on any target: which is tried again, and which line says why it ended."""

from __future__ import annotations

import re

from services.common.errors import TryAgain

EXIT_AGAIN = TryAgain.exit_code
MESSAGE_CHARACTERS = 500
ERROR_PREFIX = "millrace: "
CUT = " ..."
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# Lines of other processes, which Ray and loggers mix in between an error and the end of a log.
_OF_OTHERS = re.compile(r"\(\w+ pid=|\[?\d{4}-\d\d-\d\d[ T]|[IWEF]\d{4} ")


def resolve_exit_code(exit_code: int | None) -> int:
    """A command without an exit code, or that a signal ended, was lost with its node: it is tried again."""
    return exit_code if exit_code is not None and exit_code >= 0 else EXIT_AGAIN


def is_tried_again(exit_code: int) -> bool:
    """No other code is: nothing that a further attempt meets would be different."""
    return exit_code == EXIT_AGAIN


def find_error_line(message: str) -> str:
    """A stage's own error where there is one, else the last line of what was said; on one line, and cut at a word."""
    lines = [line for line in _ESCAPES.sub("", message).strip().splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith(ERROR_PREFIX):
            said = [lines[number].removeprefix(ERROR_PREFIX)]
            for line in lines[number + 1 :]:
                if _OF_OTHERS.match(line):
                    break
                said.append(line)
            return shorten_line(" ".join(said), MESSAGE_CHARACTERS)
    return shorten_line(lines[-1] if lines else "no message", MESSAGE_CHARACTERS)


def shorten_line(text: str, most_characters: int) -> str:
    """The text with single blanks in place of tabs and line ends; one that is too long ends after a word, in ` ...`."""
    text = " ".join(text.split())
    if len(text) <= most_characters:
        return text
    begin = text[: most_characters - len(CUT) + 1]
    return (begin.rpartition(" ")[0] or begin[:-1]) + CUT
