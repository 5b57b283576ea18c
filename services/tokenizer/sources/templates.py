"""Makes a document of a row by the Jinja2 template of a source, with the settings and `tojson` of chat templates.

Where chat templates print nothing, `None` or a Python object, which no text should hold, the row is a bad row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.errors import RecipeError
from services.tokenizer.sources.bad_rows import BadValue

Render = Callable[[Mapping[str, Any]], bytes]
"""Makes the text of a row. Raises `BadValue` for a row that lacks what the template prints."""


def compile_template(template: str, features: Mapping[str, Any], uri: str) -> tuple[list[str], Render]:
    """Return the columns that a template reads, of those with these features, and what makes the text of a row of them.

    The variable `row` reads all. Raises `RecipeError` for what is no template, and for a column that is missing.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_MissingField,
        finalize=_require_text,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    del environment.filters["random"], environment.globals["lipsum"]  # two calls give two texts
    columns = ", ".join(f"{column}: {feature}" for column, feature in features.items()) or "none"
    advice = f"The columns are {columns}. Correct `template` of this source."
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
        compiled = environment.from_string(template)
    except TemplateSyntaxError as error:
        problem = f"no Jinja2 (line {error.lineno}: {error.message})"
        raise RecipeError(f"{uri}: `template` is {problem}. {advice}") from error
    others = names.difference(features)
    if missing := sorted(others - {"row"}):
        raise RecipeError(f"{uri}: `template` names {', '.join(missing)}. {advice}")

    def render(row: Mapping[str, Any]) -> bytes:
        try:
            return compiled.render({"row": row, **row}).encode()
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadValue("not rendered", f"`template` fails: {str(error).rstrip('.')}. {advice}") from error

    return [column for column in features if others or column in names], render


class _MissingField(Undefined):
    """A missing field: false in a test, as in chat templates, and an error that names it where it is printed."""

    __str__ = StrictUndefined.__str__


def _require_text(value: object) -> object:
    if not isinstance(value, str | int | float | Decimal | date | time | timedelta | Undefined):
        kind = "null" if value is None else type(value).__name__
        raise TypeError(f"an expression is {kind}, expected text or a number")
    return value
