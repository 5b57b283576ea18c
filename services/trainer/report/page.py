"""Renders the pages from the templates beside this module. A page is one file that asks for no other."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from services.common.process.progress import write_duration


def render(template: str, **values: Any) -> str:
    """Return the page of a template of this folder. All values are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415, only at the end of a run

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {
        "json": _write_json,
        "shorten": shorten,
        "fixed": _write_fixed,
        "duration": write_duration,
        "time": lambda at: f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}",
    }
    environment.globals |= {"read_text": lambda name: loader.get_source(environment, name)[0]}
    return environment.get_template(template).render(values)


def shorten(value: object, max_characters: int = 400) -> str:
    """Return the value as text, or the text's start and three dots if it has more characters."""
    text = str(value)
    return text if len(text) <= max_characters else f"{text[: max_characters - 4]} ..."


def _write_fixed(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


def _write_json(value: Any) -> str:
    """Write JSON for a script element. JSON has neither infinities nor NaN, in whose place it has null."""
    return TypeAdapter(Any).dump_json(value).decode().replace("<", "\\u003c")
