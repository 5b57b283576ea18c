"""Reads a recipe from its TOML file and the command line, and explains what is wrong with either."""

from __future__ import annotations

import copy
import difflib
import json
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from services.common.errors import RecipeError
from services.common.problem_list import list_problems
from services.common.recipe.presets import SHIPPED
from services.common.recipe.schema import Recipe
from services.common.recipe.section import Section


@dataclass(frozen=True)
class RecipeSource:
    """A recipe as its file has it, parsed once, before its keys are judged: another version may know other keys."""

    origin: str
    """Name of the text's source for error messages, such as the file's path."""
    text: str
    parsed: dict[str, Any]

    def values(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's values with dotted overrides such as `{"train.max_steps": 500}`.

        Raises `RecipeError` for an override that no recipe can have.
        """
        values = copy.deepcopy(self.parsed)
        for dotted, value in copy.deepcopy(dict(overrides)).items():
            _override(values, dotted, value)
        return values

    def validate(self, overrides: Mapping[str, Any]) -> Recipe:
        """Raises `RecipeError` naming each wrong key with the nearest known one, and what was expected."""
        try:
            return Recipe.model_validate(self.values(overrides))
        except ValidationError as error:
            # Other defaults follow from a wrong value, and are not told.
            wrong = [each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called"]
            problems = list_problems(map(_describe_problem, wrong), "problems")
            lines = "\n  ".join(["", *problems] if len(problems) > 1 else problems)
            typed = dict.fromkeys(_find_override(each["loc"], overrides) for each in wrong)
            place = ", ".join(f"--{each}" for each in typed) if all(typed) else self.origin
            raise RecipeError(f"{place}: {lines}") from error


def load_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe with overrides such as `{"train.max_steps": 500}`. Raises `RecipeError`."""
    return read_recipe_source(path).validate(overrides or {})


def read_recipe_source(path: Path) -> RecipeSource:
    """Raises `RecipeError` for a file that cannot be read, and for one that is no recipe."""
    try:
        return parse_recipe_source(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise RecipeError(
            f"{path}: no such recipe. `ls {shlex.quote(str(SHIPPED))}` shows those that are shipped."
        ) from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error


def parse_recipe_source(content: bytes, origin: str) -> RecipeSource:
    """Parse TOML in UTF-8, with or without a byte-order mark, or the JSON file of a run or artifact of the recipe.

    Raises `RecipeError` for what is neither.
    """
    try:
        text = content.decode("utf-8-sig")
        return RecipeSource(origin, text, json.loads(text)["recipe"] if text.startswith("{") else tomllib.loads(text))
    except (ValueError, KeyError) as error:
        raise RecipeError(f"{origin}: neither a TOML file in UTF-8 nor a run.json: {error}.") from error


def read_override(word: str) -> tuple[str, str] | None:
    """Return key and value of an override, `--section.key=value` or `--name=value`; None for any other word."""
    key, equals, value = word.removeprefix("--").partition("=")
    return (key, value) if word.startswith("--") and equals and ("." in key or key == "name") else None


def read_overrides(words: Iterable[str]) -> dict[str, Any]:
    """Return the keys and values of those words that are overrides."""
    return {key: read_value(text) for key, text in filter(None, map(read_override, words))}


def read_value(text: str) -> Any:
    """Return the value of a text on a command line: TOML's, a word, or None for `null`, which TOML does not have."""
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text  # an unquoted word is a string, as a shell user expects


def _find_override(location: Sequence[Any], overrides: Iterable[str]) -> str:
    """Return the override that a problem is about; empty where none is."""
    key = ".".join(map(str, location)) + "."
    return next((each for each in overrides if key.startswith(f"{each}.") or f"{each}.".startswith(key)), "")


def explain_word(word: str) -> str:
    """Return how to write a word of a command line that may be meant as an override."""
    key, _, value = word.removeprefix("--").partition("=")
    key, text = key.replace("-", "_"), value or "VALUE"
    meant = [key] if "." in key else [f"{key}.KEY"] if key in _subsections(Recipe) else _keys_named(key)
    options = " or ".join(f"--{each}={text}" for each in meant or ["section.key"])
    return f"A recipe override is written with section and `=`: {options}."


def _override(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        if values.get(section) is None:  # run.json has such
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise RecipeError(f"--{dotted}: {section} is a value, not a section.")
    values[key] = value
    if value is None:
        del values[key]


def _describe_problem(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    dotted = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}.{_nearest_key(location)}"
    if problem["type"] == "missing":
        return f"{dotted}: missing. Give it in the recipe, or as --{dotted}=VALUE."
    if problem["type"] == "value_error":
        return (f"{dotted}: " if dotted else "") + problem["msg"].removeprefix("Value error, ")
    message = f"a section, --{dotted}.KEY=VALUE" if problem["type"] == "model_type" else problem["msg"]
    return f"{dotted}: got {problem['input']!r:.200}, expected: {message.removeprefix('Input should be ')}"


def _nearest_key(location: list[str]) -> str:
    section: type[Section] | None = Recipe
    for part in location[:-1]:
        if section and not part.isdigit():
            section = _subsections(section).get(part)
    known = list(section.model_fields) if section else []
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    if near:
        return f" Did you mean {'.'.join([*location[:-1], near[0]])!r}?"
    for key in _keys_named(location[-1]):
        return f" Did you mean {key!r}?"
    return f" Known here: {', '.join(known)}."


def _keys_named(last: str) -> list[str]:
    """Return the dotted keys of a recipe whose last word this is, or a similar one, without those in lists."""
    keys = {key: key.rpartition(".")[2] for key in _list_keys(Recipe)}
    near = difflib.get_close_matches(last, keys.values(), n=1)
    return [key for key, word in keys.items() if word in near]


def _list_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    within = _subsections(section)
    for name, field in section.model_fields.items():
        if name in within and get_origin(field.annotation) is not tuple:
            yield from _list_keys(within[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _subsections(section: type[Section]) -> dict[str, type[Section]]:
    """Return the sections in a section, and those in its lists, by name."""
    return {
        name: each
        for name, field in section.model_fields.items()
        for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
        if isinstance(each, type) and issubclass(each, Section)
    }
