"""The source `pydoc://`: the documentation of the running CPython, parsed with `ast` and never imported.

A topic of the language reference (`help("if")`) is a document, and so are the docstrings of a module.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from textwrap import indent

from services.common.errors import ArtifactError, DeviceError
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.file_system import describe_status, open_file
from services.tokenizer.sources.input_files import FileRange, Format, InputFile
from services.tokenizer.text_batch import TextBatch, in_batches

URI = "pydoc://"
TOPICS = "pydoc_data/topics.py"

# Folders of other packages, of tests, of programs, and of files that do not parse on purpose.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
)
_INDENT = "    "


def list_modules(library: Path | None = None) -> list[InputFile]:
    """List the file of the language reference, or raise `DeviceError`, then the standard library's modules by path."""
    library = library or Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(library).as_posix()
        for path in library.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(library).parts)
    )
    if TOPICS not in names:
        raise DeviceError(
            f"{URI}: {library / TOPICS} is missing: this Python was installed without its documentation. "
            f"Use another Python, or name other text in corpus.sources."
        )
    names.remove(TOPICS)
    modules = (_input_file(library, name, "python_module") for name in names)
    return [_input_file(library, TOPICS, "python_topics"), *modules]


def read_topics(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the language reference, with a document for each topic."""
    for statement in _parse(file_range.file).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="topics")], value=ast.Dict(values=values)):
                yield from in_batches(str(ast.literal_eval(value)).encode() for value in values)


def read_module(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read a module's docstrings as one document, or as none when there are no docstrings."""
    name = _module_name(file_range.file.name)
    entries = list(_describe(_parse(file_range.file), name))
    if entries:
        yield TextBatch.of(["\n\n".join([name, *entries, ""]).encode("utf-8", "replace")])


def _input_file(library: Path, name: str, file_format: Format) -> InputFile:
    path = library / name
    return InputFile(str(path), name, file_format, "", *describe_status(path.stat()))


def _parse(file: InputFile) -> ast.Module:
    with open_file(file.uri) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have invalid escapes
        try:
            return ast.parse(opened.read())
        except (SyntaxError, ValueError) as error:
            raise ArtifactError(
                f"{file.uri}: the module does not parse, and {URI} reads the whole standard library: {error}"
            ) from error


def _module_name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _describe(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """Yield the docstring of a module or class, then headings and docstrings of its classes and functions, in order."""
    own = ast.get_docstring(node)
    if own:
        yield own
    for definition in _definitions(node.body):
        heading = _heading(definition, name)
        if isinstance(definition, ast.ClassDef):
            entries = list(_describe(definition, f"{name}.{definition.name}"))
        else:
            entries = [text for text in [ast.get_docstring(definition)] if text]
        if entries:
            yield heading
            yield from (indent(entry, _INDENT) for entry in entries)


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield classes and functions of a body, also those in `if` and `try` statements."""
    for statement in body:
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield statement
            case ast.If(body=inner, orelse=other):
                yield from _definitions([*inner, *other])
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=final):
                caught = [line for handler in handlers for line in handler.body]
                yield from _definitions([*inner, *caught, *other, *final])


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> str:
    match node:
        case ast.ClassDef(bases=[]):
            return f"class {owner}.{node.name}"
        case ast.ClassDef(bases=bases):
            return f"class {owner}.{node.name}({', '.join(map(ast.unparse, bases))})"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}{owner}.{node.name}({ast.unparse(node.args)}){result}"
