"""The Makefile as a reader of its help sees it: targets under headings, and their variables."""

from __future__ import annotations

import re
import subprocess
from functools import cache

from images.platforms import REPOSITORY


def read_help(target: str = "") -> list[str]:
    """Lines of `make help`, or of `make help TARGET=...`."""
    words = ["make", "--no-print-directory", "help", *([f"TARGET={target}"] if target else [])]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def read_headings() -> dict[str, list[str]]:
    """Targets by their heading."""
    headings: dict[str, list[str]] = {}
    for line in read_help()[:-1]:
        if line.startswith("  make "):
            headings[next(reversed(headings))].append(line.split()[1])
        elif line:
            headings[line.removesuffix(":")] = []
    return headings


@cache
def read_variables(target: str) -> dict[str, str]:
    """The variables of a target, with their explanations."""
    lines = read_help(target)[1:]
    return {line.split("=")[0].strip(): meaning.strip() for line, meaning in zip(lines[::2], lines[1::2], strict=True)}


def read_rules() -> dict[str, tuple[list[str], str]]:
    """Prerequisites and recipe of each target, as the Makefile has them."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z0-9-]+):(?!=)([^#\n]*).*\n((?:[#\t].*\n)*)", text, re.MULTILINE)
    return {
        name: (needs.split(), "".join(line for line in body.splitlines(True) if line.startswith("\t")))
        for name, needs, body in rules
    }
