"""Sources `datasets://NAME`: the rows of `datasets.load_dataset`, and documents that a template makes of them.

A column of Parquet and Arrow is read as that of such files; all else by the builder of `datasets` itself, one file of
the data set after another. Its options, which the data set's card can set (the separator of CSV, the field of JSON,
`sample_by` of text), the types of columns and the source's template travel with each input file as JSON, its `builder`.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.data_files import DataFilesDict, DataFilesList
from datasets.features.features import require_storage_embed
from datasets.load import import_main_class
from datasets.table import table_cast

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.columns import find_column, follow, locate_row, read_column
from services.tokenizer.sources.file_discovery import list_paths
from services.tokenizer.sources.file_system import as_artifact_error
from services.tokenizer.sources.hub import DATASETS, warn_of_branch
from services.tokenizer.sources.input_files import FileListing, FileRange, Format, InputFile
from services.tokenizer.sources.templates import compile_template
from services.tokenizer.text_batch import TextBatch, in_batches

logger = logging.getLogger(__name__)

_FORMAT_OF_BUILDER: dict[str, Format] = {"parquet": "parquet", "arrow": "arrow"}
_ANY_ERROR = (Exception,)  # what `datasets`, pandas, Arrow and file systems raise has no common class
_OPTIONS_OF_FILES = frozenset({"name", "version", "data_dir", "data_files", "description"})
_MADE_BY_SAVE_TO_DISK = ("state.json", "dataset_dict.json")
_ROWS = 1_000


def list_dataset(source: Source) -> FileListing:
    """List the files of which `datasets.load_dataset` would make the rows of a source, in the same order.

    Raises `ArtifactError` for a name, subset or split that does not exist, and `RecipeError` where no text is found.
    """
    builder = _load_builder(source)
    kind = type(builder).__module__.rpartition(".")[2]
    files = builder.config.data_files or {}
    if source.split not in files:
        raise ArtifactError(
            f"{source.uri}: the data set has no split {source.split!r}; its splits are "
            f"{', '.join(map(str, files)) or 'none'}. Set `split` of this source to one of them."
        )
    paths = [str(path) for path in files[source.split]]
    if kind in _FORMAT_OF_BUILDER and not source.template and not _options_of(builder):
        logger.info("%s: %d files by the reader of %s, which splits them", source.uri, len(paths), kind)
        return list_paths(paths, _FORMAT_OF_BUILDER[kind], source.column)
    listing = list_paths(paths, "rows", "" if source.template else source.column)
    description = _describe_builder(builder, source, listing)
    logger.info("%s: %d files by the builder %s of datasets, a task for each", source.uri, len(paths), kind)
    return FileListing.of(dataclasses.replace(file, builder=description) for file in listing)


def read(file_range: FileRange, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the texts of the rows by the source's template or column. A row that the builder refuses ends the file.

    The builder decides how much is read at once: 10 MB of text or JSON and the rest of a line, or 10,000 rows of CSV.
    """
    file = file_range.file
    with as_artifact_error(file.uri, _ANY_ERROR):
        dataset, template = _open(file), json.loads(file.builder).get("template")
        if template:
            yield from in_batches(_render(file_range, dataset, template, bad_rows))
            return
        for table in _read_tables(dataset):
            path, _ = follow(file.column, table.schema)
            for batch in table.to_batches():
                yield from read_column(batch, path)


def _load_builder(source: Source) -> Any:
    name = source.uri.removeprefix(DATASETS)
    if source.revision is not None:
        if Path(name).exists():
            raise RecipeError(f"{source.uri}: `revision` applies to repositories of the hub, and this is a folder.")
        warn_of_branch(source.uri, source.revision)
    # The home folder, which has the default cache, may be read-only.
    with as_artifact_error(source.uri, _ANY_ERROR), tempfile.TemporaryDirectory(prefix="millrace-") as unused:
        files: Any = None
        if any(Path(name, each).exists() for each in _MADE_BY_SAVE_TO_DISK):  # which `load_dataset` refuses
            saved = datasets.load_from_disk(name)
            splits = saved if isinstance(saved, dict) else {str(saved.split or source.split): saved}
            files = {split: [each["filename"] for each in part.cache_files] for split, part in splits.items()}
            name = "arrow"
        elif "://" in name or Path(name).is_file() or (glob.has_magic(name) and not Path(name).exists()):
            path = name if "://" in name else str(Path(name).absolute())
            name, files = unused, glob.escape(path) if Path(name).is_file() else path
        return datasets.load_dataset_builder(
            name, source.subset, revision=source.revision, data_files=files, cache_dir=unused
        )


def _describe_builder(builder: Any, source: Source, listing: FileListing) -> str:
    """Return `InputFile.builder` for the files of a split, of which the first ones are read until one has a row.

    Raises `RecipeError` when the column or one that the template names is missing, or rows are made of several files.
    """
    with as_artifact_error(listing[0].uri, _ANY_ERROR):
        dataset = builder.as_streaming_dataset(source.split)
        if dataset.num_shards != len(listing):
            raise RecipeError(f"{source.uri}: a row is made of several files. Save the rows alone: Dataset.to_parquet.")
        first, features = next(filter(len, _read_tables(dataset)), None), dataset.features
        description = {"module": type(builder).__module__, "options": _options_of(builder)}
        if source.template:
            features = features or (first and datasets.Features.from_arrow_schema(first.schema))
            compile_template(source.template, _without_media(features or {}), source.uri)
            description["template"] = source.template
        elif first is not None:
            find_column(listing[0], _without_media(features).arrow_schema if features else first.schema)
        description["features"] = features and features.to_dict()
        return json.dumps(description, sort_keys=not source.template)  # a template may print a row in its order


def _options_of(builder: Any) -> dict[str, Any]:
    """Return the options of a builder that are not the defaults, apart from those that name its files."""
    config, default = builder.config, type(builder.config)()
    names = sorted({field.name for field in dataclasses.fields(config)} - _OPTIONS_OF_FILES)
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def _open(file: InputFile) -> Any:
    """Return the `datasets.IterableDataset` of a file."""
    description = json.loads(file.builder)
    features = description["features"] and datasets.Features.from_dict(description["features"])
    with tempfile.TemporaryDirectory(prefix="millrace-") as unused:
        builder = import_main_class(description["module"])(
            cache_dir=unused,
            data_files=DataFilesDict({"train": DataFilesList([file.uri], [()])}),
            info=datasets.DatasetInfo(features=features),
            **description["options"],
        )
        return builder.as_streaming_dataset("train")


def _render(file_range: FileRange, dataset: Any, template: str, bad_rows: BadRows) -> Iterator[bytes]:
    """Yield the documents of the rows, whose types are those of the whole data set: CSV has them a chunk at a time."""
    uri, features = file_range.file.uri, _without_media(dataset.features or {})
    columns, render = compile_template(template, features, uri)
    read = datasets.Features({column: features[column] for column in columns})
    rows = (
        read.decode_example(row)
        for table in filter(len, _read_tables(dataset))
        for batch in table_cast(table.select(columns), read.arrow_schema).to_batches(_ROWS)
        for row in batch.to_pylist()
    )
    located = ((partial(locate_row, file_range, number), row) for number, row in enumerate(rows))
    return bad_rows.texts_of(uri, located, render)


def _read_tables(dataset: Any) -> Iterator[pa.Table]:
    """Yield the tables as the builder makes them, or tables of the rows of a builder that makes these."""
    made = dataset._ex_iterable
    if made.iter_arrow:
        yield from (table for _, table in made.iter_arrow())
        return
    features = _without_media(dataset.features)
    rows = (features.encode_example(row) for _, row in made)
    while some := list(islice(rows, _ROWS)):
        yield pa.Table.from_pylist(some, features.arrow_schema)


def _without_media(features: Mapping[str, Any]) -> Any:
    """Return the `datasets.Features` without images, audio and other media, whose libraries are not installed."""
    return datasets.Features({name: each for name, each in features.items() if not require_storage_embed(each)})
