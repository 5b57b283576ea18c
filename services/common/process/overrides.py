"""Reads recipe overrides, `--section.key=value`, from the words of a command line."""

from __future__ import annotations

from collections.abc import Iterable


def read_override(word: str) -> tuple[str, str] | None:
    """Return key and value of an override; None for any other word."""
    key, equals, value = word.removeprefix("--").partition("=")
    return (key, value) if word.startswith("--") and equals and "." in key else None


def read_overrides(words: Iterable[str]) -> dict[str, str]:
    """Return the keys and values of those words that are overrides."""
    return dict(filter(None, map(read_override, words)))
