"""Writes the reference pages from the code that they describe: `python -m docs.site.reference FOLDER`.

`docs/site/hook.py` runs it while mkdocs builds the site, so no page of the reference is older than the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.site.commands import list_commands, read_help
from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.manifest import Manifest
from services.common.errors import EXIT_BUG, MillraceError
from services.common.process.stage_metrics import FILE_SYSTEM_METRICS, PREFIX, PROGRESS_METRICS
from services.common.recipe.schema import Recipe
from services.common.recipe.section import Identity
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS

REPOSITORY = Path(__file__).parents[2]
MANIFESTS: tuple[type[Manifest], ...] = (CorpusManifest, CompileCacheManifest, CheckpointManifest)

Schema = dict[str, Any]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site.reference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write the pages into")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        (folder / name).write_text("\n".join(write()).rstrip() + "\n", encoding="utf-8")
    return 0


def exit_codes() -> Iterator[str]:
    """One row for each error type of `services/common/errors.py`, by exit code."""
    yield "# Exit codes"
    yield "\nEvery stage, and every command that deploys one, ends with one of these codes. Only 75 is worth a retry.\n"
    yield "| code | error | meaning |\n|---|---|---|"
    yield "| 0 | | The work is done, or it was done before. |"
    yield f"| {EXIT_BUG} | any other exception | A bug of Millrace, with its traceback. |"
    for error in sorted(_all_subclasses(MillraceError), key=lambda error: (error.exit_code, error.__name__)):
        yield f"| {error.exit_code} | `{error.__name__}` | {_first_paragraph(error)} |"


def recipe() -> Iterator[str]:
    """One table for each section of the recipe's model."""
    yield "# Recipe"
    yield "\nA recipe is a TOML file. `--section.key=value` on a command line overrides one of its values. The column"
    yield "*decides* names the artifacts whose id changes with the value; other values may change during a run.\n"
    top = _schema_of(Recipe)
    yield "\n| key | type | default |\n|---|---|---|"
    for name, field in top["properties"].items():
        if "$ref" not in _unwrap(field):
            yield f"| `{name}` | {_describe_type(field)} | {_describe_default(name, top)} |"
    yield from _describe_section(Recipe, path="", heading="", decides=())


def artifacts() -> Iterator[str]:
    """The manifest's header, and the payload of each artifact kind."""
    yield "# Artifacts"
    yield "\n`manifest.json` of an artifact has the header's keys, and one key with the name of the artifact's kind.\n"
    yield "## Header"
    yield f"\n{_first_paragraph(Manifest)}\n"
    header = _schema_of(Manifest)
    yield from _describe_fields(header)
    yield from _describe_definitions(header, described := set[str]())
    for manifest in MANIFESTS:
        schema = _schema_of(manifest)
        kind = manifest.SCHEMA.partition("/")[0]
        yield f"\n## {manifest.SCHEMA}"
        yield f"\nThe key `{kind}` of the manifest:\n"
        payload = schema["properties"][kind]["$ref"].rpartition("/")[2]
        yield from _describe_fields(schema["$defs"][payload])
        described.add(payload)
        yield from _describe_definitions(schema, described)


def metrics() -> Iterator[str]:
    """The trainer's metrics."""
    yield "# Metrics"
    yield "\n`<root>/run/<run>/metrics.jsonl` has one line for each optimizer step, with these fields. TensorBoard has"
    yield f"the same names; Prometheus puts `{PREFIX}` before them. A field without a value is left out. A metric"
    yield "with a label in braces has a number for each value of the label: an object in the file, `name/value` in"
    yield "TensorBoard, and one series for each value in Prometheus.\n"
    yield "| metric | unit | over the workers | meaning |\n|---|---|---|---|"
    for metric in METRICS:
        yield f"| `{metric.field}` | {metric.unit} | {metric.reduction} | {_cell(metric.help)} |"
    yield "\n## Metrics of Prometheus alone\n"
    yield "The command of a stage measures them when it is scraped.\n"
    yield "| metric | meaning |\n|---|---|"
    for metric in RUN_METRICS:
        yield f"| `{PREFIX}{metric.field}` | {_cell(metric.help)} ({metric.unit}) |"
    for names, labels in ((PROGRESS_METRICS, "stage, phase, unit"), (FILE_SYSTEM_METRICS, "stage")):
        for name, description in names.items():
            yield f"| `{PREFIX}{name}{{{labels}}}` | {_cell(description)} |"


def commands() -> Iterator[str]:
    """The help of `make`, and that of each program."""
    yield "# Commands"
    yield "\n## make\n"
    listed = _read_make_help()
    yield f"```text\n{listed}```"
    yield "\n## Variables of make\n"
    targets = re.findall(r"^  make ([\w-]+)", listed, re.MULTILINE)
    explained = [_read_make_help(f"TARGET={target}") for target in targets]
    variables = "\n".join(text for text in explained if text.count("\n") > 1)
    yield f"```text\n{variables}```"
    for command in list_commands():
        yield f"\n## {command}\n"
        yield f"```text\n{read_help(command)}```"


def _read_make_help(*variables: str) -> str:
    words = ["make", "--silent", "help", *variables]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": commands,
    "recipe.md": recipe,
    "artifacts.md": artifacts,
    "metrics.md": metrics,
    "exit-codes.md": exit_codes,
}


def _describe_section(model: type[BaseModel], path: str, heading: str, decides: tuple[str, ...]) -> Iterator[str]:
    """A section's table, then those of the sections in it. `decides` has the kinds that the whole section decides."""
    schema = _schema_of(model)
    if path:
        yield f"\n{'#' * (2 + path.count('.'))} {heading}"
        if text := _first_paragraph(model):
            yield f"\n{text}"
        yield "\n| key | type | default | decides | meaning |\n|---|---|---|---|---|"
        for name, field in schema["properties"].items():
            yield (
                f"| `{path}.{name}` | {_describe_type(field)} | {_describe_default(name, schema)} "
                f"| {', '.join(decides or _kinds_of(model, name))} | {_cell(field.get('description', ''))} |"
            )
    for name, field in model.model_fields.items():
        for section in _models_in(field.annotation):
            key = f"{path}.{name}".lstrip(".")
            heading = f"[[{key}]]" if schema["properties"][name].get("type") == "array" else f"[{key}]"
            yield from _describe_section(section, key, heading, decides or _kinds_of(model, name))


def _schema_of(model: type[BaseModel]) -> Schema:
    """Return a model's JSON schema, in which the docstrings below fields describe these fields."""
    _take_descriptions(model)
    return model.model_json_schema()


@cache
def _take_descriptions(model: type[BaseModel]) -> None:
    """Make the docstring below each field of a model, and of models in it, the field's description.

    Pydantic could do so for every command: its `use_attribute_docstrings` reads and parses the sources of all models,
    which took 0.06 s at each start.
    """
    for field in model.model_fields.values():
        for inner in _models_in(field.annotation):
            _take_descriptions(inner)
    for definition in reversed(model.__mro__):
        if issubclass(definition, BaseModel) and definition is not BaseModel:
            for name, text in _docstrings_of(definition).items():
                model.model_fields[name].description = text
    model.model_rebuild(force=True)


def _docstrings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by the fields' names."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.target.id in model.model_fields
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _kinds_of(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """The artifact kinds whose ids a field decides."""
    marks = [mark for mark in model.model_fields[name].metadata if isinstance(mark, Identity)]
    return tuple(dict.fromkeys(kind for mark in marks for kind in mark.kinds))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models_in(inner)


def _describe_definitions(schema: Schema, described: set[str]) -> Iterator[str]:
    """The tables of a JSON schema's definitions that no page before has described."""
    for name, definition in schema["$defs"].items():
        if name not in described and "properties" in definition:
            described.add(name)
            yield f"\n### {name}\n"
            if definition.get("description"):
                yield f"{_one_line(definition['description'])}\n"
            yield from _describe_fields(definition)


def _describe_fields(schema: Schema) -> Iterator[str]:
    yield "| key | type | meaning |\n|---|---|---|"
    for name, field in schema["properties"].items():
        yield f"| `{name}` | {_describe_type(field)} | {_cell(field.get('description', ''))} |"


def _describe_type(field: Schema) -> str:
    """The type of a JSON schema in words, with its range."""
    if "anyOf" in field:
        return " or ".join(_describe_type(option) for option in field["anyOf"])
    if "$ref" in (inner := _unwrap(field)):
        return str(inner["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        items = field.get("items", {})
        return f"list of {_describe_type(items)}" if items else "list"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"table of {_describe_type(field['additionalProperties'])}"
    bounds = [f"{sign} {field[key]:,}" for key, sign in _BOUNDS.items() if key in field and field[key] < 2**63]
    return ", ".join([str(field.get("type", "any")), *bounds])


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _describe_default(name: str, schema: Schema) -> str:
    if name in schema.get("required", ()):
        return "required"
    default = schema["properties"][name].get("default")
    return "" if default is None or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _unwrap(field: Schema) -> Schema:
    """A reference with a description or a default is the only entry of `allOf`."""
    return field["allOf"][0] if len(field.get("allOf", ())) == 1 else field


def _all_subclasses(error: type[MillraceError]) -> Iterator[type[MillraceError]]:
    for each in error.__subclasses__():
        if each.__module__ == error.__module__:
            yield each
            yield from _all_subclasses(each)


def _first_paragraph(thing: type) -> str:
    return _one_line((thing.__dict__.get("__doc__") or "").partition("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
