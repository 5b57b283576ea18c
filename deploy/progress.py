"""Progress for people: a line that is reported twice in a row is printed once."""

from __future__ import annotations


class Progress:
    """Lines with one prefix, of which only a change is printed."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._reported = ""

    def report(self, text: str) -> None:
        if text != self._reported:
            print(f"{self._prefix}: {text}", flush=True)
            self._reported = text
