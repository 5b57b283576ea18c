"""Finds the files of a source: a path, a folder or a glob of any file system that fsspec has. No file is opened.

What a folder or a glob stands for follows the library `datasets`: a name that starts with a dot, and a folder that
starts with `__`, are read where the pattern spells that out. Local links are followed. A remote search asks an object
store once for 1,000 files; only a file without time or tag, as on a web server, is asked for alone.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources.file_system import (
    advise_hub,
    as_artifact_error,
    describe_info,
    describe_status,
    find_file_system,
    is_compressed,
    is_local,
    require_no_lfs_pointer,
    stat_file,
    version_of_size,
)
from services.tokenizer.sources.input_files import FileListing, Format, InputFile

logger = logging.getLogger(__name__)

FORMAT_BY_ENDING: dict[str, Format] = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
IGNORED = frozenset(
    {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "dummy_data.zip"}
    | {"state.json", "tokenizer.json"}
)
"""Files that describe a data set: those that `datasets` ignores, and one that it writes. And a vocabulary."""
# Spark, Hadoop, Databricks and Dask write these beside their parts. They hold no row, or cannot be read as one.
_MADE_BY_WRITERS = re.compile(r"_(SUCCESS|(committed|started)_\d+|(common_)?metadata)")
_TABLE_LOG = re.compile(r"(?:^|/)(_delta_log/|_spark_metadata/|_temporary/|metadata/[^/]*\.metadata\.json$)")
_KEYWORDS = "train|training|validation|valid|dev|val|test|testing|eval|evaluation"
# As `datasets.data_files` finds them, whose import takes two seconds.
_SPLIT = re.compile(rf"(?:^|[-._ 0-9/])({_KEYWORDS})(?=[-._ 0-9/])")
_HIDDEN_NAME = re.compile(r"/\.+[^./]")
_SPECIAL_FOLDER = re.compile(r"/__(?=[^/]*/)")
_REQUESTS_AT_A_TIME = 16
_LFS_BYTES = range(100, 200)
"""Sizes of a pointer of Git LFS: three lines with a hash and a size."""


class FoundFile(NamedTuple):
    """A file of a source, before its format is known."""

    path: str
    bytes: int
    version: str


def list_files(source: Source) -> FileListing:
    """List the files of a path, folder or glob, sorted by path."""
    file_system, path = find_file_system(source.uri)
    with as_artifact_error(source.uri):
        base, found = _search(file_system, path, source.uri)
        return _describe(file_system, _choose_formats(file_system, base, found, source), base, source.column)


def list_paths(uris: list[str], file_format: Format, column: str) -> FileListing:
    """Describe files of one file system, in the given order."""
    file_system, _ = find_file_system(uris[0])
    paths = [find_file_system(uri)[1] for uri in uris]
    base = os.path.commonpath([PurePosixPath(path).parent for path in paths])
    with as_artifact_error(uris[0]):
        found = [FoundFile(path, *stat_file(file_system, path)) for path in paths]
        return _describe(file_system, [(file, file_format) for file in found], base, column)


def _search(file_system: Any, path: str, uri: str) -> tuple[str, Iterable[FoundFile]]:
    """Return the folder that the files' names are relative to, and the files, sorted by path."""
    # `isfile` is true for a folder of a web server, because its index page can be read.
    if not path.endswith("/") and file_system.isfile(path):
        return path.rpartition("/")[0], [FoundFile(path, *stat_file(file_system, path))]
    is_folder = file_system.isdir(path)
    if not is_folder and not glob.has_magic(path):
        with suppress(FileNotFoundError):  # raises the error for which both are false: no credentials, no network
            file_system.info(path)
        raise ArtifactError(
            f"{uri}: the file or folder does not exist. Correct corpus.sources; relative paths start at {Path.cwd()}."
            + advise_hub(uri, "datasets")
        )
    if is_folder:
        base = path.rstrip("/")
        patterns = [f"{glob.escape(base)}/**"]
    else:
        base, patterns = _split_glob(path, is_of_folders=uri.endswith("/"))
    if file_system.isdir(f"{base}/_delta_log"):
        raise _explain_table(uri, "_delta_log")
    found = _search_locally(patterns) if is_local(file_system) else _search_remotely(file_system, patterns)
    spelled = _count_hidden(patterns[0])
    return base, (file for file in found if _count_hidden(file.path) == spelled)


def _explain_table(uri: str, log: str) -> RecipeError:
    return RecipeError(
        f"{uri}: {log} is the log of a table (Delta Lake, Iceberg) or of a Spark job, which alone tells the files that "
        f"count: others hold removed or unfinished rows. Name each live file as a source "
        f"(`deltalake.DeltaTable(FOLDER).file_uris()` lists them), or write the rows to a folder of their own."
    )


def _split_glob(path: str, is_of_folders: bool) -> tuple[str, list[str]]:
    """Return the folder before the first wildcard, and the patterns of a glob's files.

    What it matches may be folders like Spark's `out.jsonl/`.
    """
    path = path.rstrip("/")
    names = path.split("/")
    base = "/".join(names[: next(number for number, name in enumerate(names) if glob.has_magic(name))])
    if is_of_folders:
        return base, [f"{path}/**"]
    return base, [path, f"{path}/**"] if _ending(path) in FORMAT_BY_ENDING else [path]


def _search_locally(patterns: list[str]) -> Iterator[FoundFile]:
    # Only the standard library follows links as the shell does.
    found = chain.from_iterable(glob.iglob(each, recursive=True, include_hidden=True) for each in patterns)  # noqa: PTH207
    for path in sorted({path.rstrip("/") for path in found}):
        status = os.stat(path)  # noqa: PTH116 - pathlib takes twice the time for a million files, here and in `_ending`
        if not stat.S_ISDIR(status.st_mode):
            yield FoundFile(path, *describe_status(status))


def _search_remotely(file_system: Any, patterns: list[str]) -> Iterator[FoundFile]:
    file_system.invalidate_cache()
    infos: dict[str, Any] = {}
    for pattern in patterns:
        infos |= file_system.glob(pattern, detail=True)
    file_system.invalidate_cache()  # holds the same dictionaries
    for path in sorted(infos):
        info = infos.pop(path)  # so that memory for the listing comes free as the listing grows
        if info["type"] != "directory":
            yield FoundFile(path, *describe_info(info))


def _count_hidden(path: str) -> tuple[int, int]:
    """Return the numbers of names that start with a dot, and of folders that start with `__`."""
    path = f"/{path}"
    return len(_HIDDEN_NAME.findall(path)), len(_SPECIAL_FOLDER.findall(path))


def _choose_formats(
    file_system: Any, base: str, found: Iterable[FoundFile], source: Source
) -> Iterator[tuple[FoundFile, Format]]:
    """Yield the files whose format is given or known by their extension, and warn of others, and of several splits.

    Raises `RecipeError` when all files are skipped, and for a table, and `ArtifactError` when there is no file.
    """
    skipped, splits = Counter[str](), Counter[str]()
    list_saved = lru_cache(1)(partial(_list_saved, file_system))
    num_chosen = 0
    for file in found:
        folder, _, name = file.path.rpartition("/")
        relative = file.path.removeprefix(base).lstrip("/")
        if log := _TABLE_LOG.search(relative):
            raise _explain_table(source.uri, log[1])
        if name != source.uri.rpartition("/")[2]:  # a file that is named is read
            if _MADE_BY_WRITERS.fullmatch(name):
                continue
            if name in IGNORED:
                skipped[name] += 1
                continue
            if name.endswith(".arrow") and (name.startswith("cache-") or name not in (list_saved(folder) or [name])):
                skipped["what load_from_disk does not read"] += 1
                continue
        # Spark's `out.jsonl/part-00000`
        ending = _ending(name) or (_ending(folder) if name.startswith("part-") else "")
        chosen = FORMAT_BY_ENDING.get(ending) if source.format == "auto" else source.format
        if chosen is None:
            skipped[PurePosixPath(name).suffix or "no extension"] += 1
        else:
            num_chosen += 1
            if found_split := _SPLIT.search(relative):
                splits[found_split[1]] += 1
            yield file, chosen
    shown = ", ".join(f"{name} ({count})" for name, count in skipped.most_common(6))
    if not num_chosen and not skipped:
        raise ArtifactError(
            f"{source.uri}: no file was found. End a pattern of folders with /, spell names that start with . or __, "
            f"and write the [ of a name as [[]. Relative paths start at {Path.cwd()}."
        )
    if not num_chosen:
        raise RecipeError(
            f"{source.uri}: found {shown}, expected {' '.join(FORMAT_BY_ENDING)}. The library datasets reads CSV and "
            f'others: `uri = "datasets://{source.uri}"`. `format = "text"` makes every file a document.'
        )
    if skipped:
        logger.warning("%s: %d files are skipped, which are no documents: %s", source.uri, skipped.total(), shown)
    if len(splits) > 1 and splits.keys() & {"train", "training"}:
        said = "%s: the corpus takes files of several splits, %s: `datasets://FOLDER` takes those of one"
        logger.warning(said, source.uri, ", ".join(f"{name} ({count})" for name, count in splits.most_common()))


def _list_saved(file_system: Any, folder: str) -> set[str] | None:
    """Return the names of the files in a folder that `datasets.load_from_disk` reads; None where it reads none."""
    path = f"{folder}/state.json"
    if not file_system.isfile(path):
        return None
    with as_artifact_error(path, (OSError, ValueError, AttributeError, TypeError, KeyError)):
        state = json.loads(file_system.cat_file(path))
        return {each["filename"] for each in state.get("_data_files", [])}


def _ending(path: str) -> str:
    """Return the extension that decides a file's format: the one before the extension of a compression."""
    stem, ending = os.path.splitext(path)  # noqa: PTH122
    return (os.path.splitext(stem)[1] if is_compressed(path) else ending).lower()  # noqa: PTH122


def _describe(file_system: Any, chosen: Iterable[tuple[FoundFile, Format]], base: str, column: str) -> FileListing:
    """Make a listing; a remote file for which the search told its size alone is asked about on its own."""

    def describe(each: tuple[FoundFile, Format]) -> InputFile:
        file, file_format = each
        if _has_only_size(file):
            file = FoundFile(file.path, *stat_file(file_system, file.path))
        uri = file.path if is_local(file_system) else str(file_system.unstrip_protocol(file.path))
        if file.bytes in _LFS_BYTES and is_local(file_system):
            require_no_lfs_pointer(uri, Path(uri).read_bytes())
        return InputFile(uri, file.path.removeprefix(base).lstrip("/"), file_format, column, file.bytes, file.version)

    if is_local(file_system):
        return FileListing.of(map(describe, chosen))
    remote = list(chosen)
    is_asked = any(_has_only_size(file) for file, _ in remote)
    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
        listing = FileListing.of((pool.map if is_asked else map)(describe, remote))
    if unversioned := sum(map(_has_only_size, listing)):
        logger.warning("%s: the server returns no Last-Modified or ETag for %d files", listing[0].uri, unversioned)
    return listing


def _has_only_size(file: FoundFile | InputFile) -> bool:
    return file.version == version_of_size(file.bytes)
