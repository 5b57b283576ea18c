"""Opens input files on any file system of fsspec, tells their versions, and explains the errors of reading them.

A local file is known by its size and modification time, and a remote one also by its ETag. So a copy that keeps the
time is the same file, as it is for make and rsync, and every node of a cluster may read its own copy.
"""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import traceback
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import fsspec.core
import fsspec.implementations.local
import pyarrow as pa

from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError
from services.tokenizer.sources.encodings import encoding_of_mark
from services.tokenizer.sources.input_files import InputFile

# Arrow reads all streams of a file and notices one that is cut off; bz2 drops damage after a stream, and zstandard does
# neither.
_ARROW_CODECS = {".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
_FSSPEC_CODECS = {".gz": "gzip", ".tgz": "gzip", ".xz": "xz", ".lzma": "lzma"}
_BUFFER_BYTES = 2**20
_LIBRARY_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, pa.ArrowException)
# Libraries whose errors are about the network, the store or the account. The errors have no common class: botocore and
# httpx raise plain `Exception`s, and fsspec raises a `ValueError` when a server does not support range requests.
_REMOTE_LIBRARIES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx"}
    | {"huggingface_hub", "requests", "s3fs", "urllib3"}
)
# Names that file systems give to these facts in `info`, in small letters and without separators. The first name counts:
# a store may add further facts to the answer about one file that are not in its list of files.
_TAGS = ("etag", "md5hash", "contentmd5", "digest", "blobid", "checksum", "crc32c", "generation")
_TIMES = ("lastmodified", "mtime", "modified", "updated", "timemodified", "modify", "created")


def find_file_system(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URI, and the path in it.

    Raises `RecipeError` for chained file systems, `DeviceError` when a package is missing, and `ArtifactError` when a
    server does not answer.
    """
    protocol, separator, _ = uri.partition("://")
    if not separator:  # `fsspec.url_to_fs` takes `::` in the name of a file for a chain
        file_system = fsspec.filesystem("file")
        return file_system, file_system._strip_protocol(uri)
    if "::" in uri:
        raise RecipeError(f"{uri}: chained file systems (`::`) are not supported. Unpack the archive into a folder.")
    # Makes aiohttp use `.netrc` and the proxies of the environment.
    options = {"client_kwargs": {"trust_env": True}} if protocol in ("http", "https") else {}
    with explain_read_errors(uri):
        try:
            file_system, path = fsspec.url_to_fs(uri, **options)
        except (ImportError, ValueError) as error:
            raise DeviceError(f"{uri}: no package for {protocol}:// is installed: {error}.") from error
    return file_system, path


@contextmanager
def open_file(uri: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file for reading from its start. Its name's extension decides whether it is decompressed."""
    file_system, path = find_file_system(uri)
    ending = PurePosixPath(uri).suffix.lower()
    with (
        explain_read_errors(uri),
        fsspec.core.OpenFile(file_system, path, compression=_FSSPEC_CODECS.get(ending)) as file,
    ):
        stream = pa.CompressedInputStream(file, _ARROW_CODECS[ending]) if ending in _ARROW_CODECS else file
        # fsspec's own readline reads a block of 5 MB for every line of a remote file.
        reader = io.BufferedReader(stream, _BUFFER_BYTES)
        if is_compressed(uri) and not reader.peek(1) and not file_system.size(path):
            raise ArtifactError(f"{uri}: the file is empty, and a compressed one never is: it is cut off.")
        yield reader


@contextmanager
def open_text(uri: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file of text as UTF-8. With a byte-order mark of UTF-16 or UTF-32 all of it is decoded, without the mark.

    A mark of UTF-8 is left to the reader, and so are bytes that are no UTF-8.
    """
    with open_file(uri) as file:
        encoding = encoding_of_mark(file.peek(4)[:4])
        if encoding in (None, "utf-8-sig"):
            yield file
            return
        # What is no character becomes the byte 0xFF, never in UTF-8, about which `corpus.invalid_utf8` decides.
        text = file.read().decode(str(encoding), "replace").replace("\ufffd", "\udcff")
        yield io.BufferedReader(io.BytesIO(text.encode("utf-8", "surrogateescape")))


@contextmanager
def open_seekable_file(uri: str) -> Iterator[BinaryIO]:
    """Open a file for reading at any position. Raises `ArtifactError` for a compressed file."""
    if is_compressed(uri):
        raise ArtifactError(f"{uri}: the file is compressed, and this format is read by position. Decompress the file.")
    with explain_read_errors(uri), fsspec.core.OpenFile(*find_file_system(uri)) as file:
        yield file


def read_vocabulary(uri: str) -> bytes:
    """Read the vocabulary that `tokenizer.model` names. Raises `RecipeError` for a folder."""
    file_system, path = find_file_system(uri)
    if is_local(file_system) and file_system.isdir(path):
        raise RecipeError(f"{uri} is a folder. Set tokenizer.model to a file, as in {uri}/tokenizer.model.")
    with open_file(uri) as file:
        return file.read()


@contextmanager
def explain_read_errors(uri: str) -> Iterator[None]:
    """Raise errors of reading an input as `ArtifactError`. Outside of this block an `OSError` is a full disk."""
    try:
        yield
    except MillraceError:
        raise
    except _LIBRARY_ERRORS as error:
        place = getattr(error, "filename", None) or uri  # a file or folder below the source's
        raise ArtifactError(f"{place}: cannot be read: {_reason(error)}.") from error
    except Exception as error:
        if not _has_passed_a_remote_library(error):
            raise
        raise ArtifactError(f"{uri}: cannot be read: {_reason(error)}.") from error


def is_local(file_system: Any) -> bool:
    """Return whether a file system of fsspec is the one of this machine."""
    return isinstance(file_system, fsspec.implementations.local.LocalFileSystem)


def is_compressed(path: str) -> bool:
    """Return whether `open_file` decompresses a file, by its name's extension."""
    return path.lower().endswith((*_ARROW_CODECS, *_FSSPEC_CODECS))


def size_of(info: Mapping[str, Any]) -> int:
    """Return the bytes of a remote file, or 0 where a web server does not tell."""
    return int(info.get("size") or 0)


def version_of_status(status: os.stat_result) -> str:
    """Return the version of a local file."""
    return f"{status.st_size} bytes, {status.st_mtime_ns} ns"


def version_of_facts(info: Mapping[str, Any]) -> str:
    """Return the version of a remote file by the facts of its store: its size alone where it tells no time and tag."""
    facts = {"".join(filter(str.isalnum, name.lower())): value for name, value in info.items() if value is not None}
    time = next((_show_time(facts[name]) for name in _TIMES if name in facts), "")
    tag = next((str(facts[name]) for name in _TAGS if name in facts), "")
    return ", ".join(filter(None, (version_of_size(size_of(info)), time, tag)))


def version_of_size(num_bytes: int) -> str:
    """Return the version of a remote file whose store tells its size alone."""
    return f"{num_bytes} bytes"


def find_version(uri: str) -> str:
    """Ask the file system for the present version of a file: one status or one request."""
    file_system, path = find_file_system(uri)
    with explain_read_errors(uri):
        if is_local(file_system):
            return version_of_status(Path(path).stat())
        file_system.invalidate_cache(path)
        return version_of_facts(file_system.info(path))


@contextmanager
def require_unchanged(file: InputFile) -> Iterator[None]:
    """Raise `ArtifactError` when the file at the end of this block has another version than the listed one.

    Otherwise a corpus could hold two versions of a file. An error in the block that a change explains is replaced.
    """
    failure = None
    try:
        yield
    except ArtifactError as error:
        failure = error
    if find_version(file.uri) != file.version:
        raise ArtifactError(
            f"{file.uri}: the file changed while the corpus was made from it. Nothing was published. "
            f"Run the same command again when the file is complete."
        ) from failure
    if failure:
        raise failure


def _show_time(time: Any) -> str:
    """Show a time alike whether a file system gives it as a datetime or, in a list of files, as seconds since 1970."""
    seconds = time.timestamp() if isinstance(time, datetime) else time
    return f"{seconds:.6f} s" if isinstance(seconds, int | float) else str(time)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().rstrip(".")


def _has_passed_a_remote_library(error: Exception) -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.partition(".")[0] in _REMOTE_LIBRARIES for module in modules)
