"""Prints progress for people: a report that is equal to the last one is not printed again."""

from __future__ import annotations


def print_line(text: str) -> None:
    print(text, flush=True)


class ProgressPrinter:
    """Prints lines that begin with one prefix, and of equal consecutive lines only the first."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._reported = ""

    def report(self, text: str) -> None:
        if text != self._reported:
            print_line(f"{self._prefix}: {text}")
            self._reported = text
