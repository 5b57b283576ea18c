"""Collects problems in lists that stay short: ten of each kind, and the number of others.

A damaged artifact can have as many problems as files. Problems that are not shown are counted and not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

SHOWN = 10
"""Most problems of a kind that are shown."""
_SHOWN_CHARACTERS = 10_000
"""Most characters of a problem that are shown, half from its begin and half from its end."""


class ProblemList:
    """Problems in the order in which they were found, SHOWN of each kind."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._shown: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, text: str | Callable[[], str]) -> None:
        """Count a problem of a kind, such as "missing", and keep the first SHOWN texts, which a function may make."""
        self._counts[kind] += 1
        if self._shown[kind] < SHOWN:
            self._shown[kind] += 1
            self._texts.append(shorten(text if isinstance(text, str) else text()))

    def __len__(self) -> int:
        return self._counts.total()

    def lines(self) -> Iterator[str]:
        """Yield the texts that were kept, and a line for each kind with more problems."""
        yield from self._texts
        for kind, number in self._counts.items():
            if number > self._shown[kind]:
                yield f"and {number - self._shown[kind]:,} more: {kind}"


def list_problems(texts: Iterable[str], kind: str) -> list[str]:
    """Return the first SHOWN problems of one kind, and a line that counts the others."""
    problems = ProblemList()
    for text in texts:
        problems.add(kind, text)
    return list(problems.lines())


def list_names(names: Iterable[str]) -> str:
    """Return one line with the first SHOWN names and the number of others; `nothing` for no name."""
    shown: list[str] = []
    number = 0
    for number, name in enumerate(names, start=1):
        if number <= SHOWN:
            shown.append(shorten(name, 200))
    more = f" and {number - SHOWN:,} more" if number > SHOWN else ""
    return f"{', '.join(shown)}{more}" or "nothing"


def shorten(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Return a text cut to `characters`, without its middle."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} [...] {text[-half:]}"
