"""Sources on the Hugging Face hub: `hf://` paths with a revision, and `datasets://NAME` for data sets."""

from __future__ import annotations

import logging
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources.dataset_rows import describe_builder, options_of
from services.tokenizer.sources.file_discovery import list_paths
from services.tokenizer.sources.file_listing import FileListing
from services.tokenizer.sources.file_range import Format

logger = logging.getLogger(__name__)

DATASETS = "datasets://"
_REPOSITORY = re.compile(r"^hf://((datasets|spaces)/)?(?!(datasets|spaces)/)[^/@]+/[^/@]+(?=/|$)")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_FORMAT_OF_BUILDER: dict[str, Format] = {"parquet": "parquet", "arrow": "arrow"}
"""Builders whose rows, with the default options, this program reads itself: in parts, and without `datasets`."""


def with_revision(uri: str, revision: str | None) -> str:
    """Return the URI of the same files at a revision, as huggingface_hub's file system spells it."""
    if revision is None:
        return uri
    warn_of_branch(uri, revision)
    repository = _REPOSITORY.match(uri)
    if repository is None:
        raise RecipeError(
            f"{uri}: `revision` needs a URI like hf://datasets/OWNER/NAME/FOLDER, and the URI must not hold a revision."
        )
    return f"{repository[0]}@{quote(revision, safe='')}{uri.removeprefix(repository[0])}"


def list_dataset(source: Source) -> FileListing:
    """List the files of which `datasets.load_dataset` would make the rows of a source, in the same order.

    `datasets` finds the files of a name, subset, split and revision, and reads those that are no Parquet and Arrow.
    Raises `ArtifactError` for a name, subset or split that does not exist, and `RecipeError` for a data set that has no
    column of text, or whose rows are no tables.
    """
    builder = _load_builder(source)
    if source.revision is not None:
        warn_of_branch(source.uri, source.revision)
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
    if kind in _FORMAT_OF_BUILDER and not options_of(builder):
        return list_paths(paths, _FORMAT_OF_BUILDER[kind], source.column)
    listing = list_paths(paths, "rows", source.column)
    description = describe_builder(builder, source.split, listing[0])
    return FileListing.of(replace(file, builder=description) for file in listing)


def is_commit(revision: str) -> bool:
    return _COMMIT.match(revision) is not None


def warn_of_branch(uri: str, revision: str) -> None:
    if not is_commit(revision):
        logger.warning(
            "%s: the revision %r is a branch or a tag, which may change. `make pin` writes the commit into the recipe",
            uri,
            revision,
        )


def _load_builder(source: Source) -> Any:
    try:
        import datasets  # noqa: PLC0415 - the import takes two seconds
    except ImportError as error:
        raise DeviceError(
            f"{source.uri}: the Python package `datasets`, which reads {DATASETS}, is missing: {error}."
        ) from error
    name = source.uri.removeprefix(DATASETS)
    if not name:
        raise RecipeError(f"{source.uri}: the data set has no name. Write {DATASETS}OWNER/NAME or {DATASETS}FOLDER.")
    if source.revision is not None and Path(name).exists():
        raise RecipeError(f"{source.uri}: `revision` applies to repositories of the hub, and this is a folder.")
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-") as unused:  # the home folder may be read-only
            return datasets.load_dataset_builder(name, source.subset, revision=source.revision, cache_dir=unused)
    except MillraceError:
        raise
    except Exception as error:  # errors of the network, the account and the data set's files have no common class
        raise ArtifactError(f"{source.uri}: {str(error).strip() or type(error).__name__}") from error
