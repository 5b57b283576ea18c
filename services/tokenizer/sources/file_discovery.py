"""Finds the files of a source: a path, a folder or a glob of any file system that fsspec has.

A local folder is walked in the order of its paths, with one status a file, through links. A remote folder or glob is
one search by fsspec, which asks an object store once for 1,000 files and holds about 1 kB of memory for a file. Only a
file for which the search tells neither time nor tag, as on a web server, is asked for on its own. No file is opened.
"""

from __future__ import annotations

import errno
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
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

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
from services.tokenizer.sources.path_pattern import IGNORED_BY_DATASETS, PathPattern, holds_no_documents

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
_KNOWN_ENDINGS = " ".join(FORMAT_BY_ENDING)
_DOUBLE_SLASH = re.compile(r"/(\.?/)+")
_LEADS_NOWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_REQUESTS_AT_A_TIME = 16
_FILES_AT_A_TIME = 4_096


@dataclass(frozen=True)
class FoundFile:
    """A file of a source, before its format is known."""

    path: str
    bytes: int
    version: str | None
    """None where the search did not tell enough, so that the file system has to be asked about this file."""


Found = FoundFile | os.DirEntry[str]
"""What a search yields: a local file is asked for its status once its format is known."""


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
    return listing if source.format != "auto" else _without_states_of_datasets(listing)


def list_paths(uris: list[str], file_format: Format, column: str) -> FileListing:
    """Describe files of one file system, in the given order."""
    file_system, _ = find_file_system(uris[0])
    paths = [find_file_system(uri)[1] for uri in uris]
    base = os.path.commonpath([PurePosixPath(path).parent for path in paths])
    with explain_read_errors(uris[0]):
        found = ((_ask(file_system, path), file_format) for path in paths)
        return _describe(file_system, found, base, column)


def _search(file_system: Any, path: str, uri: str) -> tuple[str, Iterator[Found]]:
    """Return the folder that the files' names are relative to, and the files, sorted by path."""
    if is_local_file_system(file_system):
        path = _DOUBLE_SLASH.sub("/", path)
    # `isfile` is true for a folder of a web server, because its index page can be read.
    if not path.endswith("/") and file_system.isfile(path):
        return path.rpartition("/")[0], iter([_ask(file_system, path)])
    is_folder = file_system.isdir(path)
    if not is_folder and not glob.has_magic(path):
        _require_reachable(file_system, path)
        raise ArtifactError(
            f"{uri}: the file or folder does not exist. Correct corpus.sources; relative paths start at {Path.cwd()}."
        )
    patterns = [PathPattern(path.rstrip("/"), ["**"])] if is_folder else _patterns_of_glob(path, uri)
    if is_local_file_system(file_system):
        found: Iterator[Found] = _search_locally(patterns)
    else:
        found = _search_remotely(file_system, path, patterns, is_folder)
    first = next(found, None)
    if first is None:
        folders = [] if is_folder or uri.endswith("/") else file_system.glob(path)
        raise ArtifactError(_explain_nothing(uri, next(filter(file_system.isdir, folders), None)))
    return patterns[0].base, chain([first], found)


def _patterns_of_glob(path: str, uri: str) -> list[PathPattern]:
    """Return the pattern; also that of the files in what it matches, if these are folders like Spark's `out.jsonl/`."""
    names = path.rstrip("/").split("/")
    first = next(number for number, name in enumerate(names) if glob.has_magic(name))
    base, parts = "/".join(names[:first]), names[first:]
    if uri.endswith("/"):  # folders alone, for the shell too
        return [PathPattern(base, [*parts, "**"])]
    patterns = [PathPattern(base, parts)]
    if _ending(parts[-1]) in FORMAT_BY_ENDING:
        patterns.append(PathPattern(base, [*parts, "**"]))
    return patterns


def _explain_nothing(uri: str, matched_folder: str | None) -> str:
    if matched_folder:
        return f"{uri}: only folders match, such as {matched_folder}. To read the files below them, write {uri}/."
    escaped = f" Names with brackets are written as {uri.replace('[', '[[]')}." if "[" in uri else ""
    return (
        f"{uri}: no file was found.{escaped} Names that start with a dot, and folders that start with `__`, are read "
        f"where the pattern says so, as in `.*` or `__*/*`. Correct corpus.sources; relative paths start at "
        f"{Path.cwd()}."
    )


def _search_locally(patterns: list[PathPattern]) -> Iterator[Found]:
    for entry in _walk(patterns[0].base or "/", patterns):
        if any(pattern.matches(entry.path) for pattern in patterns):
            yield entry


def _walk(
    folder: str, patterns: list[PathPattern], depth: int = 1, above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a local folder but folders, in the order of the paths, as far as a pattern may match.

    Links are followed. Below a `**`, a folder that a link has led back to is not entered again.
    """
    status = Path(folder).stat()
    inode = (status.st_dev, status.st_ino)
    if inode in above and any(pattern.is_endless(depth) for pattern in patterns):
        return
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: f"{entry.name}/" if _is_folder(entry) else entry.name)
    for entry in found:
        if not _is_folder(entry):
            yield entry
        elif any(pattern.leads_into(entry.path, depth) for pattern in patterns):
            yield from _walk(entry.path, patterns, depth + 1, above | {inode})


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry, or what a link leads to, is a folder. A link may lead to nothing, or to itself."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno in _LEADS_NOWHERE:
            return False
        raise


def _ask_locally(entry: os.DirEntry[str]) -> FoundFile:
    """Describe a local file, or what a link leads to."""
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno not in _LEADS_NOWHERE:
            raise
        raise ArtifactError(
            f"{entry.path}: the link leads to {Path(entry.path).readlink()}, and no file is there. Remove the link."
        ) from error
    return FoundFile(entry.path, status.st_size, version_of_status(status))


def _search_remotely(file_system: Any, path: str, patterns: list[PathPattern], is_folder: bool) -> Iterator[Found]:
    file_system.invalidate_cache()
    if is_folder:
        infos = file_system.find(path, detail=True)
    else:
        infos = file_system.glob("/".join([patterns[0].base, *patterns[0].parts]), detail=True)
        folders = [name for name, info in infos.items() if info["type"] == "directory"] if len(patterns) > 1 else []
        for folder in folders:
            infos |= file_system.find(folder, detail=True)
    file_system.invalidate_cache()  # holds the same dictionaries
    for found in sorted(infos):
        info = infos.pop(found)  # so that memory for the listing comes free as the listing grows
        if info["type"] != "directory" and any(pattern.shows(found) for pattern in patterns):
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
        self._left_out: Counter[str] = Counter()

    def choose(self, path: str) -> Format | None:
        """Return the format of a file; None for a file that is skipped. Raises `RecipeError` for a vocabulary."""
        folder, _, name = path.rpartition("/")
        if holds_no_documents(name) and name != self._source.uri.rpartition("/")[2]:
            self._left_out[name] += 1
            return None
        chosen: Format | None = self._source.format if self._source.format != "auto" else None
        if chosen is None:
            if name == "tokenizer.json":
                raise RecipeError(
                    f"{path}: a vocabulary, not text. Name it in `tokenizer.model`, and text in corpus.sources, as in "
                    f"{folder}/*.txt."
                )
            # Spark's `out.jsonl/part-00000`
            chosen = FORMAT_BY_ENDING.get(_ending(path) or (_ending(folder) if name.startswith("part-") else ""))
        if chosen is None:
            self._skipped[_split_extension(path)[1] or "none"] += 1
        else:
            self._chosen += 1
        return chosen

    def require_files(self) -> None:
        """Warn of skipped files. Raises `RecipeError` when all files were skipped."""
        uri, left_out = self._source.uri, _show_counts(self._left_out)
        if not self._chosen and not self._skipped:
            raise RecipeError(
                f"{uri}: found {left_out}, which hold no documents as a rule. Set `uri` to the path of such a file, or "
                f"to a pattern that ends in its name, to read it."
            )
        if not self._chosen:
            raise RecipeError(
                f"{uri}: format 'auto' knows the extensions {_KNOWN_ENDINGS}; found {_show_counts(self._skipped)}. "
                f'Set format = "text", "jsonl", "parquet", "arrow" or "wikicorpus" for this source.'
            )
        if self._skipped:
            logger.warning(
                "%s: %d files are skipped, because format 'auto' does not know their extensions: %s",
                uri, self._skipped.total(), _show_counts(self._skipped),
            )  # fmt: skip
        ignored = Counter({name: count for name, count in self._left_out.items() if name in IGNORED_BY_DATASETS})
        if ignored:
            logger.warning(
                "%s: %s left out, as `datasets` does; a pattern that ends in such a name reads the file",
                uri, _show_counts(ignored),
            )  # fmt: skip


def _show_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(6))


def _choose(found: Iterable[Found], formats: _Formats) -> Iterator[tuple[Found, Format]]:
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


def _without_states_of_datasets(listing: FileListing) -> FileListing:
    """Drop each `state.json` that `Dataset.save_to_disk` writes beside its Arrow files: it holds no document."""
    if not any(pc.any(pc.ends_with(block.column("uri"), b"/state.json")).as_py() for block in listing.blocks):
        return listing
    folders = {file.uri.rpartition("/")[0] for file in listing if file.format == "arrow"}
    dropped = {f"{folder}/state.json" for folder in folders}
    return FileListing.of(file for file in listing if file.uri not in dropped)


def _describe(file_system: Any, chosen: Iterable[tuple[Found, Format]], base: str, column: str) -> FileListing:
    is_local = is_local_file_system(file_system)
    unversioned = 0

    def describe(each: tuple[Found, Format]) -> InputFile:
        nonlocal unversioned
        file, file_format = each
        if isinstance(file, os.DirEntry):
            file = _ask_locally(file)
        elif file.version is None:
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
    describe: Callable[[tuple[Found, Format]], InputFile], chosen: Iterable[tuple[Found, Format]]
) -> Iterator[InputFile]:
    """Describe remote files; in threads where the file system has to be asked about a file."""
    remaining = iter(chosen)
    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
        while some := list(islice(remaining, _FILES_AT_A_TIME)):
            is_asked = any(isinstance(file, FoundFile) and file.version is None for file, _ in some)
            yield from (pool.map if is_asked else map)(describe, some)
