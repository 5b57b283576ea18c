"""Reads the rows of `datasets.load_dataset` by the builder of `datasets` itself, one file after another.

A data set's card can set options of the builder (the separator of CSV, the field of JSON, `sample_by` of text), and
types of columns come from the card or from the first file. Both travel with each input file as JSON, its `builder`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from services.common.errors import ArtifactError, MillraceError, RecipeError
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.column import find_column, in_batches, read_column, row_of_file
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.text_batch import TextBatch

_TEXT = pa.schema([("text", pa.string())])
_OPTIONS_OF_FILES = frozenset({"name", "version", "data_dir", "data_files", "description"})


def options_of(builder: Any) -> dict[str, Any]:
    """Return the options of a builder that are not the defaults, apart from those that name its files."""
    names = {field.name for field in dataclasses.fields(builder.config)} - _OPTIONS_OF_FILES
    config, default = builder.config, type(builder.config)()
    return {name: getattr(config, name) for name in sorted(names) if getattr(config, name) != getattr(default, name)}


def describe_builder(builder: Any, split: str, file: InputFile) -> str:
    """Return `InputFile.builder` for the files of a split, of which the first ones are read until one has a row.

    Raises `RecipeError` where rows have no column of text, or are made in a way that is not supported.
    """
    with _explaining(file.uri):
        tables = _read_tables(builder, split)
        first = next((table for table in tables if len(table)), None)
    features = builder.info.features
    if first is not None:
        _require_text(file, first, features.arrow_schema if features is not None else first.schema)
        is_known = features is not None and file.column in features
        if is_known and pa.types.is_null(features.arrow_schema.field(file.column).type):
            features[file.column] = type(features).from_arrow_schema(_TEXT)["text"]
    description = {
        "module": type(builder).__module__,
        "options": options_of(builder),
        "features": features and features.to_dict(),
    }
    try:
        return json.dumps(description, sort_keys=True)
    except TypeError as error:
        raise RecipeError(
            f"{file.uri}: the data set's card has options that are not supported ({error}): {options_of(builder)}."
        ) from error


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return the whole file."""
    return [whole(file)]


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the column's values of the builder's rows. A null is an empty document.

    A row that the builder refuses ends the file, because nothing of `datasets` goes on behind it.
    The builder decides how much is read at once: 10 MB of text or JSON and the rest of a line, or 10,000 rows of CSV.
    """
    file = file_range.file
    with _explaining(file.uri):
        for table in _read_tables(_make_builder(file), "train"):
            if file.column not in table.column_names:  # within a struct
                path = find_column(file, table.schema)
                for batch in table.to_batches():
                    yield from read_column(batch, path)
                continue
            column = table.column(file.column)
            if not _is_text(column.type):  # a chunk of a CSV that looks like numbers: `datasets` casts it, too
                column = column.cast(pa.large_string())
            for chunk in column.chunks:
                yield from in_batches(chunk)


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    return row_of_file(file_range, number)


def _require_text(file: InputFile, first: pa.Table, schema: pa.Schema) -> None:
    """Raise `RecipeError` where the column is missing or holds no text. One of nulls alone may hold text further on."""
    if file.column not in first.column_names:
        find_column(file, first.schema)
    elif file.column not in schema.names or first.column(file.column).null_count < len(first):
        find_column(file, schema)


def _is_text(found: pa.DataType) -> bool:
    value = found.value_type if pa.types.is_dictionary(found) else found
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value))


def _make_builder(file: InputFile) -> Any:
    import datasets  # noqa: PLC0415 - the import takes two seconds
    from datasets.data_files import DataFilesDict, DataFilesList  # noqa: PLC0415
    from datasets.load import import_main_class  # noqa: PLC0415

    description = json.loads(file.builder)
    features = description["features"] and datasets.Features.from_dict(description["features"])
    with tempfile.TemporaryDirectory(prefix="millrace-") as unused:  # the home folder may be read-only
        return import_main_class(description["module"])(
            cache_dir=unused,
            data_files=DataFilesDict({"train": DataFilesList([file.uri], [()])}),
            info=datasets.DatasetInfo(features=features),
            **description["options"],
        )


def _read_tables(builder: Any, split: str) -> Iterator[pa.Table]:
    from datasets.download import StreamingDownloadManager  # noqa: PLC0415

    generators = builder._split_generators(StreamingDownloadManager())
    chosen: Sequence[Any] = [generator for generator in generators if str(generator.name) == split]
    return (table for generator in chosen for _, table in builder._generate_tables(**generator.gen_kwargs))


@contextmanager
def _explaining(uri: str) -> Iterator[None]:
    try:
        yield
    except MillraceError:
        raise
    except Exception as error:  # what `datasets`, pandas, Arrow and file systems raise has no common class
        version, reason = importlib.metadata.version("datasets"), str(error).strip() or type(error).__name__
        raise ArtifactError(f"{uri}: datasets {version} cannot read the file: {reason}") from error
