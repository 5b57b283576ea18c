"""What is asked before anything in the account changes."""

from __future__ import annotations

import os
import sys

from services.common.errors import Interrupted, RecipeError


def require_yes(question: str) -> None:
    """Ask on the terminal; `YES=1` answers for a program. Raises `RecipeError` where nobody can, or says no."""
    if os.environ.get("YES", "") not in ("", "0"):
        print(f"{question} yes (YES=1)", flush=True)
        return
    if not sys.stdin.isatty():
        raise RecipeError(f"{question} Nobody is at this terminal to say: YES=1 says yes for a program.")
    try:
        answer = input(f"{question} Only yes goes on: ")
    except EOFError:
        raise Interrupted("No answer. Nothing was changed.") from None
    if answer.strip() != "yes":
        raise RecipeError(f"{answer.strip()!r} is not yes. Nothing was changed.")
