"""Renders the pages from the templates beside this module. A page is one file that asks for no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""
    share: float | None = None
    """Share of a bar below the value, from 0 to 1; None for no bar."""


class Table(NamedTuple):
    """A table whose first column names the rows. A table without a row is left out of the page."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(template: str, **values: Any) -> str:
    """Return the page of a template of this folder. All values are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415, only at the end of a run

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"json": _write_json, "shorten": shorten}
    environment.globals |= {"read_text": lambda name: loader.get_source(environment, name)[0]}
    return environment.get_template(template).render(values)


def shorten(text: str, max_characters: int = 400) -> str:
    """Return the text, or its start and three dots if it has more characters."""
    return text if len(text) <= max_characters else f"{text[: max_characters - 4]} ..."


def write_number(value: float) -> str:
    """Write a number in few characters: 1.5M, 20k, 1,500, 0.25."""
    for least, size, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_share(value: float) -> str:
    return f"{value:.1%}"


def write_bytes(value: float) -> str:
    """Write a number of bytes in decimal units."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _write_json(value: Any) -> str:
    """Write JSON for a script element. JSON has neither infinities nor NaN, in whose place it has null."""
    return TypeAdapter(Any).dump_json(value).decode().replace("<", "\\u003c")
