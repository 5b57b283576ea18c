"""Progress for people: what is said twice in a row is printed once."""

from __future__ import annotations


class Announcements:
    """Lines with one prefix, of which only a change is printed."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._said = ""

    def say(self, text: str) -> None:
        if text != self._said:
            print(f"{self._prefix}: {text}", flush=True)
            self._said = text
