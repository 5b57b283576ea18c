"""Puts a page together from its parts: tiles, sections, tables and texts. It is one file that asks for no other.

All texts are escaped here, so callers pass them as they are; parameters named `content` are HTML.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from services.trainer.report.page_script import SCRIPT
from services.trainer.report.page_style import STYLE


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""
    share: float | None = None
    """Share of a bar below the value, from 0 to 1; None for no bar."""


def make_page(
    title: str, subtitle: str, sections: Iterable[str], *, state: str = "", numbers: Any = None, numbers_id: str = ""
) -> str:
    """Return the page as an HTML document.

    `state` becomes the content of the element `meta[name=millrace-state]`, which is near the begin of the file, and
    `numbers` become JSON in an element of type application/json with the id `numbers_id`.
    """
    data = f'<script type="application/json" id="{numbers_id}">{_write_json(numbers)}</script>' if numbers_id else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="millrace-state" content="{html.escape(state)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)} - Millrace</title><style>{STYLE}</style></head><body>"
        '<a class="skip" href="#content">Skip to the content</a>'
        f"<header><p>{html.escape(subtitle)}</p><h1>{html.escape(title)}</h1></header>"
        f'<main id="content">{"".join(sections)}</main>{data}<script>{SCRIPT}</script></body></html>\n'
    )


def make_section(identifier: str, title: str, content: str, lead: str = "") -> str:
    """Return a section with a heading, or an empty text if it would be empty."""
    if not content:
        return ""
    first = f'<p class="lead">{html.escape(lead)}</p>' if lead else ""
    return (
        f'<section aria-labelledby="{identifier}"><h2 id="{identifier}">{html.escape(title)}</h2>{first}{content}'
        "</section>"
    )


def make_tiles(tiles: Iterable[Tile]) -> str:
    return f'<dl class="tiles">{"".join(map(_make_tile, tiles))}</dl>'


def _make_tile(tile: Tile) -> str:
    bar = ""
    if tile.share is not None:
        bar = f'<span class="bar" aria-hidden="true"><span style="width:{100 * tile.share:.4g}%"></span></span>'
    note = f"<small>{html.escape(tile.note)}</small>" if tile.note else ""
    return f"<div><dt>{html.escape(tile.label)}</dt><dd>{html.escape(tile.value)}{bar}{note}</dd></div>"


def make_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column names the rows, or an empty text if there is no row.

    A wide table scrolls inside of its frame, which the keyboard can reach.
    """
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{_let_break(cell)}</th>' if number == 0 else f"<td>{html.escape(cell)}</td>"
            for number, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    if not body:
        return ""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    name = html.escape(caption)
    return (
        f'<div class="frame" role="region" aria-label="{name}" tabindex="0"><table>'
        f"<caption><span>{name}</span></caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _let_break(name: str) -> str:
    """Return an escaped name that may be broken after a dot or an underscore, where the page is narrow."""
    return re.sub(r"([._])(?=\w)", r"\1<wbr>", html.escape(name))


def make_text(text: str) -> str:
    """Return a text whose line breaks are kept."""
    return f"<pre>{html.escape(text)}</pre>"


def make_details(summary: str, content: str) -> str:
    """Return content that is shown when the reader opens it, or an empty text if there is none."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>" if content else ""


def make_grid(charts: Iterable[str]) -> str:
    """Return charts of `draw_chart` in two columns, or in one where the page is narrow; empty if all are empty.

    A last chart that would be alone in its row takes the whole row.
    """
    shown = [chart for chart in charts if chart]
    narrow = [number for number, chart in enumerate(shown) if not chart.startswith('<figure class="chart wide"')]
    if len(narrow) % 2:
        shown[narrow[-1]] = shown[narrow[-1]].replace('<figure class="chart"', '<figure class="chart row"', 1)
    content = "".join(shown)
    return f'<div class="charts">{content}</div>' if content else ""


def shorten(text: str, most_characters: int = 400) -> str:
    """Return the text, or its begin and three dots if it has more characters."""
    return text if len(text) <= most_characters else f"{text[: most_characters - 4]} ..."


def _write_json(value: Any) -> str:
    """Write JSON for an HTML element. JSON has neither infinities nor NaN, in whose place it has null."""
    return json.dumps(_without_infinities(value), indent=1).replace("<", "\\u003c")


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
