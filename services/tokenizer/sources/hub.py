"""The Hugging Face hub: revisions of `hf://` paths, and `datasets://NAME` for what `load_dataset(NAME)` would read."""

from __future__ import annotations

import logging
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError
from services.common.recipe import Source
from services.tokenizer.sources.file_range import Format, InputFile
from services.tokenizer.sources.file_system import list_paths

logger = logging.getLogger(__name__)

DATASETS = "datasets://"
_REPOSITORY = re.compile(r"^hf://((datasets|spaces)/)?(?!(datasets|spaces)/)[^/@]+/[^/@]+(?=/|$)")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_FORMAT_OF_BUILDER: dict[str, Format] = {"parquet": "parquet", "json": "jsonl", "arrow": "arrow", "text": "text"}


def with_revision(uri: str, revision: str | None) -> str:
    """The URI of the same files at a revision, as huggingface_hub's file system spells it."""
    if revision is None:
        return uri
    warn_of_branch(uri, revision)
    repository = _REPOSITORY.match(uri)
    if repository is None:
        raise RecipeError(
            f"{uri}: `revision` needs a path like hf://datasets/OWNER/NAME/FOLDER, without a revision of its own."
        )
    return f"{repository[0]}@{quote(revision, safe='')}{uri.removeprefix(repository[0])}"


def list_dataset(source: Source) -> list[InputFile]:
    """The files that `datasets.load_dataset` would read for this source, in its order.

    `datasets` resolves names, subsets, splits and revisions to files; the files are read here, without its cache.
    Raises `ArtifactError` for a name, subset or split that is not there, `RecipeError` for a format not read here.
    """
    builder = _load_builder(source)
    if source.revision is not None:
        warn_of_branch(source.uri, source.revision)
    file_format = _FORMAT_OF_BUILDER.get(type(builder).__module__.rpartition(".")[2])
    if file_format is None:
        raise RecipeError(
            f"{source.uri}: its files are of a format that is not read here ({type(builder).__name__}). "
            f"Read are: {', '.join(_FORMAT_OF_BUILDER)}."
        )
    files = builder.config.data_files or {}
    if source.split not in files:
        raise ArtifactError(
            f"{source.uri}: no split {source.split!r}; it has {', '.join(map(str, files)) or 'none'}. Set `split`."
        )
    paths = [str(path) for path in files[source.split]]
    return list_paths(paths, file_format, source.column)


def is_commit(revision: str) -> bool:
    return _COMMIT.match(revision) is not None


def warn_of_branch(uri: str, revision: str) -> None:
    if not is_commit(revision):
        logger.warning(
            "%s: revision %r is a branch or a tag, which may move: `make pin` writes the commit into the recipe",
            uri,
            revision,
        )


def _load_builder(source: Source) -> Any:
    try:
        import datasets  # noqa: PLC0415 - takes two seconds, and only these sources need it
    except ImportError as error:
        raise DeviceError(
            f"{source.uri}: the package `datasets` is missing, which reads {DATASETS}: {error}."
        ) from error
    name = source.uri.removeprefix(DATASETS)
    if source.revision is not None and Path(name).exists():
        raise RecipeError(f"{source.uri}: `revision` is of a repository on the Hugging Face hub, and this is a folder.")
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-") as unused:  # or the home folder has to be writable
            return datasets.load_dataset_builder(name, source.subset, revision=source.revision, cache_dir=unused)
    except MillraceError:
        raise
    except Exception as error:  # of the network, of the account, or of whatever the data set's own files hold
        raise ArtifactError(f"{source.uri}: {str(error).strip() or type(error).__name__}") from error
