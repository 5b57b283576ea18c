"""Opens files on all file systems of fsspec, and explains the errors of reading them."""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import fsspec.archive
import fsspec.core
import fsspec.implementations.chained
import fsspec.implementations.local
import fsspec.utils
import pyarrow as pa

from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError
from services.common.input.files import require_regular_file
from services.common.process.limits import explain_lack
from services.tokenizer.sources.decompression import ConcatenatedStreams

logger = logging.getLogger(__name__)

_WRAPPERS = (fsspec.archive.AbstractArchiveFileSystem, fsspec.implementations.chained.ChainedFileSystem)

_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    "bzip2": lambda file: ConcatenatedStreams(file, bz2.BZ2Decompressor),
    "xz": lambda file: ConcatenatedStreams(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
    "lzma": lambda file: ConcatenatedStreams(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_ALONE)),
    # Arrow notices a file that is cut off, and zstandard does not.
    "zstd": lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"),
    "lz4": lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "lz4"),
}
_COMPRESSION_BY_ENDING = {
    ".gz": "gzip",
    ".tgz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lzma": "lzma",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".lz4": "lz4",
}
_WINDOW_ABOVE_LIMIT = "requires too much memory"
_BUFFER_BYTES = 2**20
MAX_VOCABULARY_BYTES = 2**28
"""Bytes of the largest vocabulary that is read. Vocabularies of 260,000 pieces have 35 MB."""
# Libraries whose errors are about the network, the store or the account. The errors have no common class: botocore and
# httpx raise plain `Exception`s, and fsspec raises a `ValueError` when a server does not support range requests.
_REMOTE_LIBRARIES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx"}
    | {"huggingface_hub", "requests", "s3fs", "urllib3"}
)


def find_file_system(uri: str) -> tuple[Any, str]:
    """The fsspec file system of a URI, and the path in it.

    Raises `DeviceError` when its package is missing, `ArtifactError` when its server does not answer, and `RecipeError`
    when it takes more than an address to open it.
    """
    protocol = uri.partition("://")[0] if "://" in uri else "file"
    try:
        # `fsspec.core.url_to_fs` takes `::` in a file's name for a chain of file systems.
        kind = fsspec.get_filesystem_class(protocol.rpartition("::")[2])
        if "::" in protocol or ("::" in uri and issubclass(kind, _WRAPPERS)):
            raise RecipeError(
                f"{uri}: chained file systems (`::`) are not supported. Unpack the archive into a folder."
            )
        file_system = kind(**kind._get_kwargs_from_urls(uri), **_options_of(uri))
        path = kind._strip_protocol(uri)
    except RecipeError:
        raise
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
def open_file(uri: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file for reading from its begin. Its name's extension decides whether it is decompressed."""
    _require_regular(uri)
    codec = _COMPRESSION_BY_ENDING.get(PurePosixPath(uri).suffix.lower())
    try:
        opened = fsspec.core.OpenFile(*find_file_system(uri), compression=None if codec else "infer")
    except ValueError as error:
        raise DeviceError(f"{uri}: this Python cannot decompress the file ({error}).") from error
    with explain_read_errors(uri), opened as file:
        if codec is None:
            _require_one_member(uri)
            # fsspec's own readline reads a block of 5 MB for every line of a remote file.
            yield io.BufferedReader(file, _BUFFER_BYTES)
            return
        with _DECOMPRESSORS[codec](file) as stream:
            reader = io.BufferedReader(stream, _BUFFER_BYTES)
            if not reader.peek(1) and not file.tell():
                raise ArtifactError(f"{uri}: the file is empty, and a {codec} file never is: it is cut off.")
            yield reader


def read_vocabulary(uri: str) -> bytes:
    """Read the vocabulary that `tokenizer.model` names.

    Raises `ArtifactError` for a file of more than MAX_VOCABULARY_BYTES after decompression, and `RecipeError` for a
    folder that has a vocabulary's file.
    """
    try:
        with open_file(uri) as file:
            content = file.read(MAX_VOCABULARY_BYTES + 1)
    except ArtifactError as error:
        if found := _vocabularies_in(uri):
            raise RecipeError(f'{uri} is a folder. Set tokenizer.model = "{found[0]}".') from error
        raise
    if len(content) > MAX_VOCABULARY_BYTES:
        raise ArtifactError(
            f"{uri}: the file has more than {MAX_VOCABULARY_BYTES:,} bytes, so it is no vocabulary. "
            f"Set tokenizer.model to a vocabulary's file, such as tokenizer.model or tokenizer.json."
        )
    return content


def _vocabularies_in(uri: str) -> list[str]:
    """Return the addresses of the vocabularies in a folder; none where it is no folder."""
    file_system, path = find_file_system(uri)
    with explain_read_errors(uri):
        paths = file_system.ls(path, detail=False) if file_system.isdir(path) else []
    names = sorted(each.rpartition("/")[2] for each in paths)
    return [f"{uri.rstrip('/')}/{name}" for name in names if name.endswith(("tokenizer.json", ".model", ".tiktoken"))]


def _require_regular(uri: str) -> None:
    """Raise `ArtifactError` for a local path that is no regular file. Opening a pipe would wait without end."""
    file_system, path = find_file_system(uri)
    if is_local_file_system(file_system):
        with explain_read_errors(uri):
            require_regular_file(Path(path))


@contextmanager
def open_seekable_file(uri: str) -> Iterator[BinaryIO]:
    """Open a file for reading at any position. Raises `ArtifactError` for a compressed file."""
    if is_compressed(uri):
        raise ArtifactError(f"{uri}: the file is compressed, and this format is read by position. Decompress the file.")
    _require_regular(uri)
    with explain_read_errors(uri), fsspec.core.OpenFile(*find_file_system(uri)) as file:
        yield file


@contextmanager
def explain_read_errors(uri: str) -> Iterator[None]:
    """Raise errors of reading an input as `ArtifactError`. Outside of this block an `OSError` is a full disk."""
    try:
        yield
    except MillraceError:
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        place = getattr(error, "filename", None) or uri  # a file or folder below the source's
        if _WINDOW_ABOVE_LIMIT in str(error):
            raise ArtifactError(
                f"{uri}: its zstd window is above 128 MiB, the most that is read. Write it anew: "
                f"`zstd -dc --long=31 FILE | zstd -o NEW`."
            ) from error
        raise explain_lack(error, uri) or ArtifactError(f"{place}: cannot be read: {_reason(error)}.") from error
    except Exception as error:
        if not _has_passed_a_remote_library(error):
            raise
        raise ArtifactError(f"{uri}: cannot be read: {_reason(error)}.") from error


def is_local(uri: str) -> bool:
    """Return whether a URI is a path on this machine."""
    return is_local_file_system(find_file_system(uri)[0])


def is_local_file_system(file_system: Any) -> bool:
    """Return whether a file system of fsspec is the one of this machine."""
    return isinstance(file_system, fsspec.implementations.local.LocalFileSystem)


def is_compressed(uri: str) -> bool:
    """Return whether `open_file` decompresses a file, by its name's extension."""
    return (
        PurePosixPath(uri).suffix.lower() in _COMPRESSION_BY_ENDING or fsspec.utils.infer_compression(uri) is not None
    )


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
    with fsspec.core.OpenFile(*find_file_system(uri)) as file, zipfile.ZipFile(file) as archive:
        if len(archive.filelist) != 1:
            raise ArtifactError(
                f"{uri}: the zip archive has {len(archive.filelist)} files, and must have one. Unpack it into a folder."
            )
