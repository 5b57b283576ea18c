"""Asks for confirmation before anything in the account changes."""

from __future__ import annotations

import os
import sys

from services.common.errors import RecipeError


def require_yes(question: str) -> None:
    """Asks on the terminal; `YES=1` answers yes.

    Raises `RecipeError` without a terminal, or for any other answer than yes.
    """
    if os.environ.get("YES", "") not in ("", "0"):
        print(f"{question} yes (YES=1)", flush=True)
        return
    if not sys.stdin.isatty():
        raise RecipeError(f"{question} There is no terminal to ask on; set YES=1 to answer yes")
    print(f"{question} Type yes to continue: ", end="", flush=True)
    if (answer := sys.stdin.readline().strip()) != "yes":
        raise RecipeError(f"{answer!r} is not yes. Nothing was changed.")
