"""Lists of problems and names that stay short: the first MAX_SHOWN, and the number of others."""

from __future__ import annotations

from collections.abc import Iterable

MAX_SHOWN = 10


def list_problems(problems: Iterable[str], kind: str) -> list[str]:
    """Return the first MAX_SHOWN problems, and a line that counts the others, which are of this kind."""
    found = list(problems)
    return found[:MAX_SHOWN] + ([f"and {len(found) - MAX_SHOWN:,} more: {kind}"] if len(found) > MAX_SHOWN else [])


def list_names(names: Iterable[str]) -> str:
    """Return one line with the first MAX_SHOWN names and the number of others; `nothing` for no name."""
    found = list(names)
    more = f" and {len(found) - MAX_SHOWN:,} more" if len(found) > MAX_SHOWN else ""
    return ", ".join(found[:MAX_SHOWN]) + more or "nothing"
