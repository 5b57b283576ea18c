"""Lists and opens files on all file systems of fsspec, and finds out whether a file has changed."""

from __future__ import annotations

import glob
import io
import logging
import lzma
import os
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import fsspec.core
import fsspec.implementations.local
import fsspec.utils
import pyarrow as pa
import xxhash

from services.common.artifacts.files import xxh3_of
from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError
from services.common.input.credentials import holds_secret
from services.common.input.files import reading_inputs, require_regular_file
from services.common.process.limits import explain_lack
from services.common.recipe.schema import Source, fingerprint
from services.tokenizer.sources.file_range import Format, InputFile

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
# Arrow decompresses these, because it notices a file that is cut off, as zstandard does not, at 3 times gzip's speed.
_ARROW_CODEC_BY_ENDING = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
_RECORDS_OF_DATASETS = ("dataset_info.json", "state.json")
_BUFFER_BYTES = 2**20
MAX_VOCABULARY_BYTES = 2**28
"""Bytes of the largest vocabulary that is read. Vocabularies of 260,000 pieces have 35 MB."""
_HASHING_THREADS = 4
_LARGE_FILE_BYTES = 2**30
"""Bytes above which a file is examined before it is hashed. Hashing runs at 5 to 10 GB a second."""
# Parts of the names that file systems give to a checksum, a version or a modification time in `info`.
_VERSION_FACTS = (
    "etag",
    "md5",
    "checksum",
    "digest",
    "crc",
    "generation",
    "version",
    "modif",
    "mtime",
    "blob_id",
)
# Libraries whose errors are about the network, the store or the account. The errors have no common class: botocore and
# httpx raise plain `Exception`s, and fsspec raises a `ValueError` when a server does not support range requests.
_REMOTE_LIBRARIES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx"}
    | {"huggingface_hub", "requests", "s3fs", "urllib3"}
)


def list_files(source: Source, examine: Callable[[InputFile], None]) -> list[InputFile]:
    """List the files of a path, folder or glob, sorted by path, with format and digest.

    `examine` is called with a large local file before the file is hashed. Raises `ArtifactError` when there is no file,
    and `RecipeError` when no format is known for the files' names.
    """
    file_system, path = find_file_system(source.uri)
    with explain_read_errors(source.uri):
        base, paths = _expand(file_system, path, source.uri)
        chosen = _choose_formats(source, paths)
        return _describe(file_system, chosen, base, source.column, examine)


def list_paths(uris: list[str], file_format: Format, column: str) -> list[InputFile]:
    """Describe files of one file system, in the given order."""
    file_system, _ = find_file_system(uris[0])
    paths = [find_file_system(uri)[1] for uri in uris]
    base = os.path.commonpath([PurePosixPath(path).parent for path in paths])
    with explain_read_errors(uris[0]):
        return _describe(file_system, dict.fromkeys(paths, file_format), base, column)


def find_file_system(uri: str) -> tuple[Any, str]:
    """The fsspec file system of a URI, and the path in it.

    Raises `DeviceError` when its package is missing, `ArtifactError` when its server does not answer, and `RecipeError`
    when it takes more than an address to open it.
    """
    protocol = uri.partition("://")[0]
    if "::" in uri:
        raise RecipeError(f"{uri}: chained file systems (`::`) are not supported. Unpack the archive into a folder.")
    try:
        file_system, path = fsspec.core.url_to_fs(uri, **_options_of(uri))
    except ImportError as error:
        raise DeviceError(f"{uri}: the Python package that reads {protocol}:// is missing: {error}.") from error
    except ValueError as error:
        raise DeviceError(
            f"{uri}: no file system called {protocol!r}. Install the fsspec package that provides it, or "
            f"use one of: file, http, s3, gs, hf (`python -c 'import fsspec; print(fsspec.available_protocols())'`)."
        ) from error
    except OSError as error:
        raise explain_lack(error, uri) or ArtifactError(f"{uri}: cannot be read: {_reason(error)}.") from error
    except Exception as error:  # whatever the package of a file system raises for an address without its options
        raise RecipeError(
            f"{uri}: {protocol}:// cannot be opened by its address alone ({_reason(error)}). Copy the files to a "
            f"folder, or to a store whose addresses are read: file, http, s3, gs, hf."
        ) from error
    return file_system, path


@contextmanager
def open_file(uri: str) -> Iterator[BinaryIO]:
    """Open a file for reading from its begin. Its name's extension decides whether it is decompressed."""
    _require_regular(uri)
    codec = _ARROW_CODEC_BY_ENDING.get(PurePosixPath(uri).suffix.lower())
    try:
        opened = fsspec.open(uri, mode="rb", compression=None if codec else "infer", **_options_of(uri))
    except ValueError as error:
        raise DeviceError(f"{uri}: this Python cannot decompress the file ({error}).") from error
    with explain_read_errors(uri), opened as file:
        if codec is None:
            _require_one_member(uri)
            # fsspec's own readline reads a block of 5 MB for every line of a remote file.
            yield io.BufferedReader(file, _BUFFER_BYTES)
            return
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) as stream:
            reader = io.BufferedReader(stream, _BUFFER_BYTES)
            if not reader.peek(1) and not file.tell():
                raise ArtifactError(f"{uri}: the file is empty, and a {codec} file never is: it is cut off.")
            yield reader


def read_vocabulary(uri: str) -> bytes:
    """Read the vocabulary that `tokenizer.model` names.

    Raises `ArtifactError` for a file of more than MAX_VOCABULARY_BYTES after decompression.
    """
    with open_file(uri) as file:
        content = file.read(MAX_VOCABULARY_BYTES + 1)
    if len(content) > MAX_VOCABULARY_BYTES:
        raise ArtifactError(
            f"{uri}: the file has more than {MAX_VOCABULARY_BYTES:,} bytes, so it is no vocabulary. "
            f"Set tokenizer.model to a vocabulary's file, such as tokenizer.model or tokenizer.json."
        )
    return content


def _require_regular(uri: str) -> None:
    """Raise `ArtifactError` for a local path that is no regular file. Opening a pipe would wait without end."""
    file_system, path = find_file_system(uri)
    if _is_local(file_system):
        with explain_read_errors(uri):
            require_regular_file(Path(path))


@contextmanager
def open_seekable_file(uri: str) -> Iterator[BinaryIO]:
    """Open a file for reading at any position. Raises `ArtifactError` for a compressed file."""
    if is_compressed(uri):
        raise ArtifactError(f"{uri}: the file is compressed, and this format is read by position. Decompress the file.")
    _require_regular(uri)
    with explain_read_errors(uri), fsspec.open(uri, mode="rb", **_options_of(uri)) as file:
        yield file


@contextmanager
def require_unchanged(file: InputFile) -> Iterator[None]:
    """Raise `ArtifactError` when the file changes between its listing and the end of this block.

    Otherwise a corpus could hold other text than its digest says. A file that has another stamp than the listed one
    during the whole block, such as a copy on another machine, is compared by its digest.
    """
    changed = ArtifactError(
        f"{file.uri}: the file changed while the corpus was made from it. Nothing was published. "
        f"Run the same command again when the file is complete."
    )
    before = _stamp(file.uri)
    try:
        yield
    except ArtifactError as error:
        if not _is_as_listed(file, before):
            raise changed from error
        raise
    if not _is_as_listed(file, before):
        raise changed


def stamp_of_file(path: Path) -> str:
    """Return a value that changes when a local file is written or replaced."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


@contextmanager
def explain_read_errors(uri: str) -> Iterator[None]:
    """Raise errors of reading an input as `ArtifactError`. Outside of this block an `OSError` is a full disk."""
    try:
        yield
    except MillraceError:
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise explain_lack(error, uri) or ArtifactError(f"{uri}: cannot be read: {_reason(error)}.") from error
    except Exception as error:
        if not _has_passed_a_remote_library(error):
            raise
        raise ArtifactError(f"{uri}: cannot be read: {_reason(error)}.") from error


def is_local(uri: str) -> bool:
    """Return whether a URI is a path on this machine."""
    return _is_local(find_file_system(uri)[0])


def is_compressed(uri: str) -> bool:
    """Return whether `open_file` decompresses a file, by its name's extension."""
    suffix = PurePosixPath(uri).suffix.lower()
    return suffix in _ARROW_CODEC_BY_ENDING or fsspec.utils.infer_compression(uri) is not None


def _options_of(uri: str) -> dict[str, Any]:
    """Return options of fsspec. `trust_env` makes aiohttp use `.netrc` and the proxies of the environment."""
    protocol = uri.partition("://")[0].lower()
    return {"client_kwargs": {"trust_env": True}} if protocol in ("http", "https") else {}


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().rstrip(".")


def _has_passed_a_remote_library(error: Exception) -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.partition(".")[0] in _REMOTE_LIBRARIES for module in modules)


def _require_one_member(uri: str) -> None:
    """Raise `ArtifactError` for a zip archive of several files. fsspec would read the first one alone."""
    if PurePosixPath(uri).suffix.lower() != ".zip":
        return
    with fsspec.open(uri, mode="rb", **_options_of(uri)) as file, zipfile.ZipFile(file) as archive:
        if len(archive.filelist) != 1:
            raise ArtifactError(
                f"{uri}: the zip archive has {len(archive.filelist)} files, and must have one. Unpack it into a folder."
            )


def _expand(file_system: Any, path: str, uri: str) -> tuple[str, list[str]]:
    """Return the folder that the files' names are relative to, and the files' paths, sorted."""
    # `isfile` is true for a folder of a web server, because its index page can be read.
    if not path.endswith("/") and file_system.isfile(path):
        return path.rpartition("/")[0], [path]
    if file_system.isdir(path):
        found = [file for file in file_system.find(path) if not _is_hidden(file.removeprefix(path))]
        base = path
    elif glob.has_magic(path):
        found = [file for file in file_system.glob(path) if file_system.isfile(file)]
        base = path[: next(index for index, char in enumerate(path) if char in "*?[")].rpartition("/")[0]
    else:
        _require_reachable(file_system, path)
        raise ArtifactError(
            f"{uri}: the file or folder does not exist. Correct corpus.sources; relative paths start at {Path.cwd()}."
        )
    if _is_local(file_system):
        with reading_inputs(Path(path)):  # a folder or a glob may hold links and pipes
            for file in found:
                require_regular_file(Path(file), within=Path(base or "/"))
    if not found:
        raise ArtifactError(f"{uri}: no file was found. Correct corpus.sources; relative paths start at {Path.cwd()}.")
    return base, sorted(found)


def _require_reachable(file_system: Any, path: str) -> None:
    """Raise the error for which `isfile` and `isdir` returned False: no credentials, no network, or a pipe."""
    with suppress(FileNotFoundError):
        if _is_local(file_system):
            require_regular_file(Path(path))
        file_system.info(path)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _choose_formats(source: Source, paths: list[str]) -> dict[str, Format]:
    if source.format != "auto":
        return dict.fromkeys(paths, source.format)
    paths = _without_records_of_datasets(paths)
    chosen = {path: FORMAT_BY_ENDING[_ending(path)] for path in paths if _ending(path) in FORMAT_BY_ENDING}
    skipped = [path for path in paths if path not in chosen]
    if not chosen:
        raise RecipeError(
            f"{source.uri}: format 'auto' knows the extensions {_KNOWN_ENDINGS}; found {_count_endings(skipped)}. "
            f'Set format = "text", "jsonl", "parquet", "arrow" or "wikicorpus" for this source.'
        )
    if skipped:
        logger.warning(
            "%s: %d files are skipped, because format 'auto' does not know their extensions: %s",
            source.uri, len(skipped), _count_endings(skipped),
        )  # fmt: skip
    return chosen


def _without_records_of_datasets(paths: list[str]) -> list[str]:
    """Drop the JSON files that `Dataset.save_to_disk` writes beside its Arrow files: they hold no documents."""
    folders = {path.rpartition("/")[0] for path in paths if path.endswith(".arrow")}
    records = {f"{folder}/{name}" for folder in folders for name in _RECORDS_OF_DATASETS}
    return [path for path in paths if path not in records]


def _ending(path: str) -> str:
    suffixes = PurePosixPath(path).suffixes
    if suffixes and is_compressed(path):
        suffixes.pop()
    return suffixes[-1].lower() if suffixes else ""


def _count_endings(paths: list[str]) -> str:
    counts = Counter(PurePosixPath(path).suffix or "none" for path in paths)
    return ", ".join(f"{ending} ({count})" for ending, count in counts.most_common(6))


def _describe(
    file_system: Any,
    chosen: dict[str, Format],
    base: str,
    column: str,
    examine: Callable[[InputFile], None] = lambda file: None,
) -> list[InputFile]:
    def describe(path: str) -> InputFile:
        uri = _uri_of(file_system, path)
        if holds_secret(uri):  # the address is from a data set's card or from a web server's list of files
            raise ArtifactError(
                f"{uri}: the file's address holds credentials, and a corpus stores the addresses of its inputs. "
                f"Download the file, and name the local copy in corpus.sources."
            )
        name = path.removeprefix(base).lstrip("/")
        if _is_local(file_system) and (size := Path(path).stat().st_size) > _LARGE_FILE_BYTES:
            _require_regular(path)
            examine(InputFile(uri, name, chosen[path], column, size, digest="", stamp=""))
        size, digest, stamp = _identify(file_system, path)
        return InputFile(uri, name, chosen[path], column, size, digest, stamp)

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(describe, chosen))


def _identify(file_system: Any, path: str) -> tuple[int, str, str]:
    """Return size, digest and stamp of a file. A remote file's digest is of the facts that its store gives, if any."""
    if _is_local(file_system):
        _require_regular(path)
        stamp, size, digest = stamp_of_file(Path(path)), Path(path).stat().st_size, xxh3_of(Path(path))
        if stamp_of_file(Path(path)) != stamp:
            raise ArtifactError(f"{path}: the file is being written. Run the same command again when it is complete.")
        return size, digest, stamp
    size, facts, stamp = _ask_store(file_system, path)
    if facts:
        return size, stamp, stamp
    with file_system.open(path, "rb") as file:
        return size, _xxh3_of_stream(file), stamp


def _ask_store(file_system: Any, path: str) -> tuple[int, dict[str, str], str]:
    """Return a remote file's size, the facts about its version, and a stamp made from both."""
    info = file_system.info(path)
    facts = {key: str(info[key]) for key in info if any(fact in key.lower() for fact in _VERSION_FACTS)}
    size = int(info.get("size") or 0)
    return size, facts, fingerprint({"ukey": file_system.ukey(path) if not facts else "", "size": size, **facts})


def _xxh3_of_stream(file: BinaryIO) -> str:
    hasher = xxhash.xxh3_128()
    while block := file.read(_BUFFER_BYTES):
        hasher.update(block)
    return hasher.hexdigest()


def _stamp(uri: str) -> str:
    file_system, path = find_file_system(uri)
    with explain_read_errors(uri):
        if _is_local(file_system):
            return stamp_of_file(Path(path))
        file_system.invalidate_cache(path)
        return _ask_store(file_system, path)[2]


def _is_as_listed(file: InputFile, stamp_before: str) -> bool:
    stamp = _stamp(file.uri)
    return stamp == stamp_before and (stamp == file.stamp or _digest_at(file.uri, stamp) == file.digest)


@lru_cache(maxsize=1_000)
def _digest_at(uri: str, stamp: str) -> str:
    """Return a file's digest while it has this stamp. The cache spares the tasks that share a file a second read."""
    file_system, path = find_file_system(uri)
    with explain_read_errors(uri):
        return _identify(file_system, path)[1]


def _is_local(file_system: Any) -> bool:
    return isinstance(file_system, fsspec.implementations.local.LocalFileSystem)


def _uri_of(file_system: Any, path: str) -> str:
    return path if _is_local(file_system) else str(file_system.unstrip_protocol(path))
