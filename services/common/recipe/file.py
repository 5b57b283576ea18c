"""Reads a recipe from its TOML file and the command line, and explains what is wrong with either."""

from __future__ import annotations

import copy
import difflib
import errno
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.common.errors import RecipeError
from services.common.input.credentials import WHERE_THEY_BELONG, holds_secret, mask, mask_values, require_no_credentials
from services.common.input.files import MAX_DEPTH, read_file, require_plain
from services.common.input.problem_list import ProblemList
from services.common.input.text_encoding import decode_text, encoding_of_mark, guess_encoding
from services.common.process.limits import explain_lack
from services.common.recipe.schema import Recipe
from services.common.recipe.section import Section

MAX_RECIPE_BYTES = 2**20


@dataclass(frozen=True)
class RecipeSource:
    """A recipe as its file has it, parsed once, before its keys are judged: another version may know other keys."""

    origin: str
    """Name of the text's source for error messages, such as the file's path."""
    text: str
    parsed: dict[str, Any]

    def values(self, overrides: Mapping[str, str]) -> dict[str, Any]:
        """The recipe's values with dotted overrides such as `{"train.max_steps": "500"}`.

        Raises `RecipeError` for an override that no recipe can have.
        """
        values = copy.deepcopy(self.parsed)
        for dotted, text in overrides.items():
            _require_no_secrets(f"--{mask(dotted)[:200]}", f"{dotted}={text}")
            _override(values, dotted, text)
        _require_no_credentials(values, self.origin, "")
        return values

    def validate(self, overrides: Mapping[str, str]) -> Recipe:
        """Raises `RecipeError` naming each wrong key with the nearest known one, and what was expected."""
        try:
            return Recipe.model_validate(self.values(overrides))
        except ValidationError as error:
            problems = ProblemList()
            for problem in error.errors(include_url=False):
                if problem["type"] == "default_factory_not_called":  # the default follows from a wrong value
                    continue
                problems.add(problem["type"], partial(_explain, problem))
            raise RecipeError(
                f"{self.origin}: " + ("\n  " if len(problems) > 1 else "") + "\n  ".join(problems.lines())
            ) from error


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe and apply dotted overrides such as `{"train.max_steps": "500"}`.

    Raises `RecipeError` naming the file, each wrong key with the nearest known one, and what was expected.
    """
    return read_recipe_source(path).validate(overrides or {})


def read_recipe_source(path: Path) -> RecipeSource:
    """Raises `RecipeError` for a file that cannot be read, and for one that is no TOML."""
    try:
        content = read_file(path, max_bytes=MAX_RECIPE_BYTES)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise RecipeError(f"{path}: no such recipe. `ls recipes/` shows those that are shipped.") from error
        raise explain_lack(error, path) or RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_recipe_source(content, str(path))


def parse_recipe_source(content: bytes, origin: str) -> RecipeSource:
    """Parse TOML in UTF-8, or in the encoding that its byte-order mark names.

    Raises `RecipeError` for what is no TOML, and for a line that holds a credential.
    """
    shown = content.decode(encoding_of_mark(content) or "utf-8", "replace")
    for number, line in enumerate(shown.splitlines(), start=1):
        _require_no_secrets(f"{origin}:{number}", line)
    try:
        text = decode_text(content)
        return RecipeSource(origin, text, _parse_toml(text))
    except ValueError as error:
        is_text = not isinstance(error, UnicodeDecodeError) and b"\0" not in content
        encoding = "" if is_text else f" It looks like {guess_encoding(content)}; save it as UTF-8."
        raise RecipeError(f"{origin}: not a TOML file: {error}.{encoding}") from error


def _require_no_secrets(place: str, text: str) -> None:
    """Raise `RecipeError` for a line with a credential, also in a comment, because the text travels to a cluster as it
    is.
    """
    if holds_secret(text):
        raise RecipeError(f"{place}: holds a user, a password, a token or a signature. {WHERE_THEY_BELONG}")


def _require_no_credentials(value: Any, path: str, dotted: str) -> None:
    """Raise `RecipeError` for a text that may hold a credential, also under an unknown key: a deployment of an image of
    another version reads a part of a recipe, and stores all of it.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            _require_no_credentials(each, path, f"{dotted}.{key}" if dotted else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _require_no_credentials(each, path, f"{dotted}.{index}")
    elif isinstance(value, str):
        try:
            require_no_credentials(value, "the value")
        except ValueError as error:
            raise RecipeError(f"{path}: {mask(dotted)}: {error}") from error


def _parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML into plain values. Raises `ValueError`, also where tomllib raises `RecursionError`."""
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from error
    require_plain(values)
    return values


def _override(values: dict[str, Any], dotted: str, text: str) -> None:
    *sections, key = dotted.split(".")
    try:
        require_plain([dotted, text])  # a command line can hold bytes that are not UTF-8
        if len(sections) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        value = _parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted word is a string, as a shell user expects
    except ValueError as error:
        raise RecipeError(f"--{dotted[:200]}: cannot be read: {error}") from error
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise RecipeError(f"--{dotted}: {section} is a value, not a section.")
    values[key] = value


def _shorten(value: Any) -> str:
    """Return a value as a message shows it: cut to a length that a person reads, and without credentials."""
    if repr(mask_values(value)) != repr(value):  # NaN is not equal to itself
        return "a value that may hold credentials"
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = shown.maxlong = 200
    return shown.repr(value)


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    dotted = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}.{_nearest_key(location)}"
    if problem["type"] == "missing":
        return f"{dotted}: missing. Every recipe needs it; see recipes/tiny-cpu.toml."
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{dotted}: {message}" if dotted else message
    return f"{dotted}: got {_shorten(problem['input'])}, expected: {message.removeprefix('Input should be ')}"


def _nearest_key(location: list[str]) -> str:
    model: Any = Recipe
    for part in location[:-1]:
        field = model.model_fields.get(part) if model else None
        model = _section_type(field.annotation) if field else (model if part.isdigit() else None)
    known = list(model.model_fields) if model else []
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    if near:
        return f" Did you mean {'.'.join([*location[:-1], near[0]])!r}?"
    elsewhere = [f"{name}.{location[-1]}" for name in Recipe.model_fields if location[-1] in _keys_of(name)]
    if elsewhere:
        return f" Did you mean {elsewhere[0]!r}?"
    return f" Known here: {', '.join(known)}."


def _section_type(annotation: Any) -> type[Section] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, Section)), None)


def _keys_of(section: str) -> list[str]:
    model = _section_type(Recipe.model_fields[section].annotation)
    return list(model.model_fields) if model else []
