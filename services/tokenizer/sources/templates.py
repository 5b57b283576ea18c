"""Makes a document of a row by the Jinja2 template of a source, in the environment of transformers' chat templates.

Where chat templates print nothing, `None` or a Python object, which no text should hold, the row is a bad row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, meta, nodes

from services.common.errors import RecipeError
from services.tokenizer.sources.bad_rows import BadValue

_UNSET = {"tools": None, "documents": None, "add_generation_prompt": False}
"""What `apply_chat_template` gives a template besides the messages."""
Render = Callable[[Mapping[str, Any]], bytes]
"""Makes the text of a row. Raises `BadValue` for a row that lacks what the template prints."""


def compile_template(template: str, features: Mapping[str, Any], uri: str) -> tuple[list[str], Render]:
    """Return the columns that a template reads, of those with these features, and what makes the text of a row of them.

    The variable `row` reads all. Raises `RecipeError` for what is no template, and for a column that is missing.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415 - takes a second

    environment = _compile_jinja_template("").environment.overlay(undefined=_MissingField, finalize=_require_text)
    # Two calls give two texts. A template that asks whether there is `strftime_now` has a date of its own.
    environment.filters = {name: each for name, each in environment.filters.items() if name != "random"}
    unstable = ("lipsum", "strftime_now")
    environment.globals = {name: each for name, each in environment.globals.items() if name not in unstable}
    columns = ", ".join(f"{column}: {feature}" for column, feature in features.items()) or "none"
    advice = f"The columns are {columns}. Correct `template` of this source."
    try:
        parsed = environment.parse(template)
        names = meta.find_undeclared_variables(parsed)
        compiled = environment.from_string(template)
    except TemplateSyntaxError as error:
        problem = f"no Jinja2 (line {error.lineno}: {error.message})"
        raise RecipeError(f"{uri}: `template` is {problem}. {advice}") from error
    tests = (test for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined"))
    asked = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
    others = names.difference(features)
    if missing := sorted(others - {"row", *_UNSET, *asked}):
        reason = " (each day another text: write the date)" if "strftime_now" in missing else ""
        raise RecipeError(f"{uri}: `template` names {', '.join(missing)}{reason}. {advice}")

    def render(row: Mapping[str, Any]) -> bytes:
        try:
            return compiled.render({**_UNSET, "row": row, **row}).encode()
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadValue("not rendered", f"`template` fails: {str(error).rstrip('.')}. {advice}") from error

    return [column for column in features if "row" in others or column in names], render


class _MissingField(Undefined):
    """A missing field: false in a test, as in chat templates, and an error that names it where it is printed."""

    __str__ = StrictUndefined.__str__


def _require_text(value: object) -> object:
    if not isinstance(value, str | int | float | Decimal | date | time | timedelta | Undefined):
        kind = "null" if value is None else type(value).__name__
        raise TypeError(f"an expression is {kind}, expected text or a number")
    return value
