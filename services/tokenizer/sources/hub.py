"""Sources on the Hugging Face hub: `hf://` paths with a revision, and `datasets://NAME` for data sets.

`datasets` finds the files of a data set. Parquet and Arrow are read as such files are; all others by the builder of
`datasets` itself, one file after another. Its options, which the data set's card can set (the separator of CSV, the
field of JSON, `sample_by` of text), and the types of columns travel with each input file as JSON, its `builder`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from services.common.errors import ArtifactError, RecipeError, shell_command
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.columns import find_column, follow, read_column
from services.tokenizer.sources.file_discovery import list_paths
from services.tokenizer.sources.file_system import as_artifact_error
from services.tokenizer.sources.input_files import FileListing, FileRange, Format, InputFile
from services.tokenizer.text_batch import TextBatch

logger = logging.getLogger(__name__)

DATASETS = "datasets://"
_REPOSITORY = re.compile(r"^hf://((datasets|spaces)/)?(?!(datasets|spaces)/)[^/@]+/[^/@]+(?=/|$)")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_FORMAT_OF_BUILDER: dict[str, Format] = {"parquet": "parquet", "arrow": "arrow"}
_OPTIONS_OF_FILES = frozenset({"name", "version", "data_dir", "data_files", "description"})
_ANY_ERROR = (Exception,)  # what `datasets`, pandas, Arrow and file systems raise has no common class


def with_revision(uri: str, revision: str | None) -> str:
    """Return the URI of the same files at a revision, as huggingface_hub's file system spells it."""
    if revision is None:
        return uri
    _warn_of_branch(uri, revision)
    repository = _REPOSITORY.match(uri)
    if repository is None:
        raise RecipeError(
            f"{uri}: `revision` needs a URI like hf://datasets/OWNER/NAME/FOLDER, and the URI must not hold a revision."
        )
    return f"{repository[0]}@{quote(revision, safe='')}{uri.removeprefix(repository[0])}"


def is_commit(revision: str) -> bool:
    return _COMMIT.match(revision) is not None


def list_dataset(source: Source) -> FileListing:
    """List the files of which `datasets.load_dataset` would make the rows of a source, in the same order.

    Raises `ArtifactError` for a name, subset or split that does not exist, and `RecipeError` where no text is found.
    """
    builder = _load_builder(source)
    kind = type(builder).__module__.rpartition(".")[2]
    if not hasattr(builder, "_generate_tables"):
        raise RecipeError(
            f"{source.uri}: the format of its files is not supported ({kind}). Supported are those that `datasets` "
            f"reads as tables, such as parquet, arrow, json, csv and text."
        )
    files = builder.config.data_files or {}
    if source.split not in files:
        raise ArtifactError(
            f"{source.uri}: the data set has no split {source.split!r}; its splits are "
            f"{', '.join(map(str, files)) or 'none'}. Set `split` of this source to one of them."
        )
    paths = [str(path) for path in files[source.split]]
    if kind in _FORMAT_OF_BUILDER and not _options_of(builder):
        return list_paths(paths, _FORMAT_OF_BUILDER[kind], source.column)
    listing = list_paths(paths, "rows", source.column)
    description = _describe_builder(builder, source.split, listing[0])
    return FileListing.of(dataclasses.replace(file, builder=description) for file in listing)


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the column's values of the builder's rows. A row that the builder refuses ends the file.

    The builder decides how much is read at once: 10 MB of text or JSON and the rest of a line, or 10,000 rows of CSV.
    """
    file = file_range.file
    with as_artifact_error(file.uri, _ANY_ERROR):
        for table in _read_tables(_make_builder(file), "train"):
            path, _ = follow(file.column, table.schema)
            for batch in table.to_batches():
                yield from read_column(batch, path)


def _warn_of_branch(uri: str, revision: str) -> None:
    if not is_commit(revision):
        logger.warning("%s: %r may change: %s pins it", uri, revision, shell_command("services.tokenizer", "pin"))


def _load_builder(source: Source) -> Any:
    import datasets  # noqa: PLC0415 - the import takes two seconds

    name = source.uri.removeprefix(DATASETS)
    if source.revision is not None:
        if Path(name).exists():
            raise RecipeError(f"{source.uri}: `revision` applies to repositories of the hub, and this is a folder.")
        _warn_of_branch(source.uri, source.revision)
    # The home folder, which has the default cache, may be read-only.
    with as_artifact_error(source.uri, _ANY_ERROR), tempfile.TemporaryDirectory(prefix="millrace-") as unused:
        return datasets.load_dataset_builder(name, source.subset, revision=source.revision, cache_dir=unused)


def _describe_builder(builder: Any, split: str, file: InputFile) -> str:
    """Return `InputFile.builder` for the files of a split, of which the first ones are read until one has a row."""
    with as_artifact_error(file.uri, _ANY_ERROR):
        first = next((table for table in _read_tables(builder, split) if len(table)), None)
        features = builder.info.features
        if first is not None:
            find_column(file, features.arrow_schema if features is not None else first.schema)
        description = {
            "module": type(builder).__module__,
            "options": _options_of(builder),
            "features": features and features.to_dict(),
        }
        return json.dumps(description, sort_keys=True)


def _options_of(builder: Any) -> dict[str, Any]:
    """Return the options of a builder that are not the defaults, apart from those that name its files."""
    config, default = builder.config, type(builder.config)()
    names = sorted({field.name for field in dataclasses.fields(config)} - _OPTIONS_OF_FILES)
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def _make_builder(file: InputFile) -> Any:
    import datasets  # noqa: PLC0415 - the import takes two seconds
    from datasets.data_files import DataFilesDict, DataFilesList  # noqa: PLC0415
    from datasets.load import import_main_class  # noqa: PLC0415

    description = json.loads(file.builder)
    features = description["features"] and datasets.Features.from_dict(description["features"])
    with tempfile.TemporaryDirectory(prefix="millrace-") as unused:
        return import_main_class(description["module"])(
            cache_dir=unused,
            data_files=DataFilesDict({"train": DataFilesList([file.uri], [()])}),
            info=datasets.DatasetInfo(features=features),
            **description["options"],
        )


def _read_tables(builder: Any, split: str) -> Iterator[pa.Table]:
    from datasets.download import StreamingDownloadManager  # noqa: PLC0415

    for generator in builder._split_generators(StreamingDownloadManager()):
        if str(generator.name) == split:
            for _, table in builder._generate_tables(**generator.gen_kwargs):
                yield table
