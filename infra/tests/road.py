"""The commands of a road as its page prints them, for tests that walk it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from images.platforms import REPOSITORY
from infra.apply.roads import Target

PAGES = {"eks": REPOSITORY / "infra/README.md", "batch": REPOSITORY / "docs/operations/batch.md"}


@dataclass(frozen=True)
class Typed:
    """A line that a reader types: for `make`, its target and its variables."""

    line: str
    target: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def read_lines(target: Target) -> list[str]:
    """The lines of the page's list, without what indents them."""
    lines = PAGES[target].read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"    cp infra/stacks/{target}/"))
    end = next(number for number, line in enumerate(lines[begin:], start=begin) if not line.startswith("    "))
    return [line.removeprefix("    ") for line in lines[begin:end]]


def read_road(target: Target) -> list[Typed]:
    """The page's commands, without their comments."""
    return [_read(line.partition("  #")[0].rstrip()) for line in read_lines(target)]


def _read(line: str) -> Typed:
    words = shlex.split(line)
    if words[0] != "make":
        return Typed(line)
    return Typed(line, words[1], dict(word.split("=", 1) for word in words[2:]))
