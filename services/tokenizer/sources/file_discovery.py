"""Finds the files of a source: a path, a folder or a glob of any file system that fsspec has.

A local folder is walked in the order of its paths, with one status a file. A remote folder or glob is one search by
fsspec, which asks an object store once for 1,000 files and holds about 1 kB of memory for a file. Only a file for which
the search tells neither time nor tag, as on a web server, is asked for on its own. No file is opened.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec.utils
import pyarrow as pa
import pyarrow.compute as pc

from services.common.errors import ArtifactError, RecipeError
from services.common.input.credentials import holds_secret
from services.common.input.files import reading_inputs, require_regular_file
from services.common.recipe.schema import Source
from services.tokenizer.sources.file_listing import FileListing
from services.tokenizer.sources.file_range import Format, InputFile
from services.tokenizer.sources.file_system import (
    explain_read_errors,
    find_file_system,
    is_compressed,
    is_local_file_system,
)
from services.tokenizer.sources.file_version import size_of, version_of_facts, version_of_size, version_of_status

logger = logging.getLogger(__name__)

FORMAT_BY_ENDING: dict[str, Format] = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_KNOWN_ENDINGS = " ".join(FORMAT_BY_ENDING)
_RECORDS_OF_DATASETS = ("dataset_info.json", "state.json")
_REQUESTS_AT_A_TIME = 16
_FILES_AT_A_TIME = 4_096


@dataclass(frozen=True)
class FoundFile:
    """A file of a source, before its format is known."""

    path: str
    bytes: int
    version: str | None
    """None where the search did not tell enough, so that the file system has to be asked about this file."""


def list_files(source: Source) -> FileListing:
    """List the files of a path, folder or glob, sorted by path.

    Raises `ArtifactError` when there is no file, and `RecipeError` when no format is known for the files' names.
    """
    file_system, path = find_file_system(source.uri)
    with explain_read_errors(source.uri):
        base, found = _search(file_system, path, source.uri)
        formats = _Formats(source)
        listing = _describe(file_system, _choose(found, formats), base, source.column)
    formats.require_files()
    return listing if source.format != "auto" else _without_records_of_datasets(listing)


def list_paths(uris: list[str], file_format: Format, column: str) -> FileListing:
    """Describe files of one file system, in the given order."""
    file_system, _ = find_file_system(uris[0])
    paths = [find_file_system(uri)[1] for uri in uris]
    base = os.path.commonpath([PurePosixPath(path).parent for path in paths])
    with explain_read_errors(uris[0]):
        found = ((_ask(file_system, path), file_format) for path in paths)
        return _describe(file_system, found, base, column)


def _search(file_system: Any, path: str, uri: str) -> tuple[str, Iterator[FoundFile]]:
    """Return the folder that the files' names are relative to, and the files, sorted by path."""
    # `isfile` is true for a folder of a web server, because its index page can be read.
    if not path.endswith("/") and file_system.isfile(path):
        return path.rpartition("/")[0], iter([_ask(file_system, path)])
    if file_system.isdir(path):
        base, depth, is_wanted = path, None, _is_visible_below(path)
    elif glob.has_magic(path):
        base = path[: next(index for index, char in enumerate(path) if char in "*?[")].rpartition("/")[0]
        depth = None if "**" in path else path.removeprefix(base).count("/")
        is_wanted = re.compile(fsspec.utils.glob_translate(path)).match
    else:
        _require_reachable(file_system, path)
        raise ArtifactError(
            f"{uri}: the file or folder does not exist. Correct corpus.sources; relative paths start at {Path.cwd()}."
        )
    if is_local_file_system(file_system):
        found = _search_locally(base or "/", depth, is_wanted)
    else:
        found = _search_remotely(file_system, path, is_wanted)
    first = next(found, None)
    if first is None:
        raise ArtifactError(f"{uri}: no file was found. Correct corpus.sources; relative paths start at {Path.cwd()}.")
    return base, _after(first, found)


def _after(first: FoundFile, rest: Iterator[FoundFile]) -> Iterator[FoundFile]:
    yield first
    yield from rest


def _is_visible_below(folder: str) -> Callable[[str], object]:
    """Return a test of paths: whether neither a file below `folder` nor a folder on the way to the file is hidden."""
    at = len(folder.rstrip("/"))
    return lambda path: "/." not in path[at:]


def _walk(folder: str, depth: int | None = None) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a local folder but folders, in the order of the paths. A link is not followed.

    With a depth, at most so many names follow the folder in a path.
    """

    def order(entry: os.DirEntry[str]) -> str:
        return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name

    with os.scandir(folder) as entries:
        found = sorted(entries, key=order)
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            yield entry
        elif depth is None or depth > 1:
            yield from _walk(entry.path, None if depth is None else depth - 1)


def _search_locally(base: str, depth: int | None, is_wanted: Callable[[str], object]) -> Iterator[FoundFile]:
    for entry in _walk(base, depth):
        if is_wanted(entry.path):
            yield _ask_locally(entry, Path(base))


def _ask_locally(entry: os.DirEntry[str], base: Path) -> FoundFile:
    """Describe a local file. A folder or a glob may hold pipes, and links to anywhere, which are refused."""
    if entry.is_file(follow_symlinks=False):
        status = entry.stat(follow_symlinks=False)
    else:
        with reading_inputs(Path(entry.path)):
            status = require_regular_file(Path(entry.path), within=base)
    return FoundFile(entry.path, status.st_size, version_of_status(status))


def _search_remotely(file_system: Any, path: str, is_wanted: Callable[[str], object]) -> Iterator[FoundFile]:
    file_system.invalidate_cache()
    is_folder = file_system.isdir(path)
    infos = (file_system.find if is_folder else file_system.glob)(path, detail=True)
    file_system.invalidate_cache()  # holds the same dictionaries
    for found in sorted(infos):
        info = infos.pop(found)  # so that memory for the listing comes free as the listing grows
        if is_wanted(found) if is_folder else info["type"] == "file":
            yield FoundFile(found, size_of(info), version_of_facts(info))


def _ask(file_system: Any, path: str) -> FoundFile:
    """Describe one file: by its status, or by one request."""
    if is_local_file_system(file_system):
        with reading_inputs(Path(path)):
            status = require_regular_file(Path(path))
        return FoundFile(path, status.st_size, version_of_status(status))
    file_system.invalidate_cache(path)
    info = file_system.info(path)
    return FoundFile(path, size_of(info), version_of_facts(info) or version_of_size(info))


def _require_reachable(file_system: Any, path: str) -> None:
    """Raise the error for which `isfile` and `isdir` returned False: no credentials, no network, or a pipe."""
    with suppress(FileNotFoundError):
        if is_local_file_system(file_system):
            require_regular_file(Path(path))
        file_system.info(path)


class _Formats:
    """Chooses formats by the extensions of names, and counts the files that it skips."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chosen = 0
        self._skipped: Counter[str] = Counter()

    def choose(self, path: str) -> Format | None:
        """Return the format of a file; None for a file that is skipped."""
        if self._source.format != "auto":
            return self._source.format
        chosen = FORMAT_BY_ENDING.get(_ending(path))
        if chosen is None:
            self._skipped[_split_extension(path)[1] or "none"] += 1
        else:
            self._chosen += 1
        return chosen

    def require_files(self) -> None:
        """Warn of skipped files. Raises `RecipeError` when all files were skipped."""
        if not self._skipped:
            return
        skipped = ", ".join(f"{ending} ({count})" for ending, count in self._skipped.most_common(6))
        if not self._chosen:
            raise RecipeError(
                f"{self._source.uri}: format 'auto' knows the extensions {_KNOWN_ENDINGS}; found {skipped}. "
                f'Set format = "text", "jsonl", "parquet", "arrow" or "wikicorpus" for this source.'
            )
        logger.warning(
            "%s: %d files are skipped, because format 'auto' does not know their extensions: %s",
            self._source.uri, self._skipped.total(), skipped,
        )  # fmt: skip


def _choose(found: Iterable[FoundFile], formats: _Formats) -> Iterator[tuple[FoundFile, Format]]:
    for file in found:
        if chosen := formats.choose(file.path):
            yield file, chosen


def _ending(path: str) -> str:
    """Return the extension that decides a file's format: the one before the extension of a compression."""
    stem, ending = _split_extension(path)
    if _means_compression(ending):
        ending = _split_extension(stem)[1]
    return ending.lower()


def _split_extension(path: str) -> tuple[str, str]:
    """Split a path before the extension of its name, as pathlib does, at a tenth of its cost for a million paths."""
    stem, dot, ending = path.rpartition(".")
    return (stem, f".{ending}") if dot and "/" not in ending and stem[-1:] not in ("", "/") else (path, "")


@lru_cache(maxsize=1_000)
def _means_compression(ending: str) -> bool:
    return is_compressed(f"a{ending}")


def _without_records_of_datasets(listing: FileListing) -> FileListing:
    """Drop the JSON files that `Dataset.save_to_disk` writes beside its Arrow files: they hold no documents."""
    records = [f"/{name}" for name in _RECORDS_OF_DATASETS]
    if not any(_ends_with_any(block.column("uri"), records) for block in listing.blocks):
        return listing
    folders = {file.uri.rpartition("/")[0] for file in listing if file.uri.endswith(".arrow")}
    dropped = {f"{folder}{name}" for folder in folders for name in records}
    return FileListing.of(file for file in listing if file.uri not in dropped)


def _ends_with_any(column: pa.Array, endings: list[str]) -> bool:
    return any(pc.any(pc.ends_with(column, ending)).as_py() for ending in endings)


def _describe(file_system: Any, chosen: Iterable[tuple[FoundFile, Format]], base: str, column: str) -> FileListing:
    is_local = is_local_file_system(file_system)
    unversioned = 0

    def describe(each: tuple[FoundFile, Format]) -> InputFile:
        nonlocal unversioned
        file, file_format = each
        if file.version is None:
            file = _ask(file_system, file.path)
        uri = file.path if is_local else str(file_system.unstrip_protocol(file.path))
        if not is_local and holds_secret(uri):  # the address is from a data set's card or a web server's list of files
            raise ArtifactError(
                f"{uri}: the file's address holds credentials, and a corpus stores the addresses of its inputs. "
                f"Download the file, and name the local copy in corpus.sources."
            )
        version = str(file.version)
        unversioned += not is_local and version == f"{file.bytes} bytes"
        name = file.path.removeprefix(base).lstrip("/")
        return InputFile(uri, name, file_format, column, file.bytes, version)

    listing = FileListing.of(map(describe, chosen) if is_local else _map_in_threads_where_asked(describe, chosen))
    if unversioned:
        logger.warning(
            "%s: the server tells neither time nor tag of %s files. A file that is replaced by another one of the same "
            "size is not noticed, and its corpus is not made anew.", listing[0].uri, f"{unversioned:,}",
        )  # fmt: skip
    return listing


def _map_in_threads_where_asked(
    describe: Callable[[tuple[FoundFile, Format]], InputFile], chosen: Iterable[tuple[FoundFile, Format]]
) -> Iterator[InputFile]:
    """Describe remote files; in threads where the file system has to be asked about a file."""
    remaining = iter(chosen)
    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
        while some := list(islice(remaining, _FILES_AT_A_TIME)):
            is_asked = any(file.version is None for file, _ in some)
            yield from (pool.map if is_asked else map)(describe, some)
