"""Opens input files on any file system of fsspec, and tells their versions.

A local file is known by its size and modification time, and a remote one also by its ETag. So a copy that keeps the
time is the same file, as it is for make and rsync, and every node of a cluster may read its own copy.
"""

from __future__ import annotations

import codecs
import io
import lzma
import os
import re
import shlex
import tarfile
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
from services.tokenizer.sources.input_files import InputFile

# Arrow reads all streams of a file and notices one that is cut off; bz2 drops damage after a stream, and zstandard does
# neither.
_ARROW_CODECS = {".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
_FSSPEC_CODECS = {".gz": "gzip", ".tgz": "gzip", ".lzma": "lzma"}
_BUFFER_BYTES = 2**20
_LFS_MARK = b"version https://git-lfs.github.com/spec/"
_LIBRARY_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, pa.ArrowException)
# Of a remote file these are bugs of Millrace, and no fault of the network, the store or the account.
_BUGS = (TypeError, AttributeError, KeyError, NameError, AssertionError)
_ENCODING_OF_MARK = {  # UTF-32's little-endian mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Names that file systems give to these facts in `info`, in small letters and without separators. The first name counts:
# a store may add further facts to the answer about one file that are not in its list of files.
_TAGS = ("etag", "md5hash", "contentmd5", "digest", "blobid", "checksum", "crc32c", "generation")
_TIMES = ("lastmodified", "mtime", "modified", "updated", "timemodified", "modify", "created")


def find_file_system(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URI, and the path in it. Raises `DeviceError` when a package is missing."""
    protocol, separator, _ = uri.partition("://")
    if not separator:  # `fsspec.url_to_fs` takes `::` in the name of a file for a chain
        file_system = fsspec.filesystem("file")
        return file_system, file_system._strip_protocol(uri)
    if "::" in uri:
        raise RecipeError(f"{uri}: chained file systems (`::`) are not supported. Unpack the archive into a folder.")
    # Makes aiohttp use `.netrc` and the proxies of the environment.
    options = {"client_kwargs": {"trust_env": True}} if protocol in ("http", "https") else {}
    with as_artifact_error(uri):
        try:
            file_system, path = fsspec.url_to_fs(uri, **options)
        except (ImportError, ValueError) as error:
            raise DeviceError(f"{uri}: no package for {protocol}:// is installed: {error}.") from error
    return file_system, path


@contextmanager
def as_artifact_error(uri: str, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise a library's error about an input as `ArtifactError` with its address. Elsewhere `OSError` is a full disk.

    By default all classes but those of bugs count for a remote file, because botocore, httpx and fsspec raise plain
    `Exception`s.
    """
    expected = errors or ((Exception,) if "://" in uri else _LIBRARY_ERRORS)
    unexpected = (MillraceError, MemoryError, *(() if errors else _BUGS))
    try:
        yield
    except Exception as error:
        if isinstance(error, unexpected) or not isinstance(error, expected):
            raise
        place = getattr(error, "filename", None) or uri  # a file or folder below the source's
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        is_hub_lost = uri.startswith(("datasets://", "hf://")) and type(error).__name__.startswith("Connect")
        advice = " Check the name, the network or proxy, and HF_TOKEN for gated data." if is_hub_lost else ""
        if isinstance(error, FileNotFoundError):
            advice = advise_hub(uri, "hf")
        raise ArtifactError(f"{place}: cannot be read: {reason.strip().rstrip('.')}.{advice}") from error


def advise_hub(uri: str, protocol: str) -> str:
    """Return a sentence for a path that does not exist and looks like the name of a repository, or no sentence."""
    return f" A repository of the hub is {protocol}://{uri}." if re.fullmatch(r"[\w.-]+/[\w.-]+", uri) else ""


class _XzReader(io.RawIOBase):
    """The text of all streams of an xz file. `lzma.LZMAFile` drops the streams behind padding, which is zeros."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._stream = file, lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        text = b""
        while not text:
            content = self._stream.unused_data
            if self._stream.eof:
                while not (content := content.lstrip(b"\0")):
                    if not (content := self._file.read(_BUFFER_BYTES)):
                        return 0
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._stream.needs_input and not (content := self._file.read(_BUFFER_BYTES)):
                raise EOFError("the file ends within a stream: it is cut off")
            text = self._stream.decompress(content, len(buffer))
        buffer[: len(text)] = text
        return len(text)


@contextmanager
def open_file(uri: str) -> Iterator[io.BufferedReader[Any]]:
    """Open a file for reading from its start. Its name's extension decides whether it is decompressed."""
    file_system, path = find_file_system(uri)
    ending = PurePosixPath(uri).suffix.lower()
    with (
        as_artifact_error(uri),
        fsspec.core.OpenFile(file_system, path, compression=_FSSPEC_CODECS.get(ending)) as file,
    ):
        stream = pa.CompressedInputStream(file, _ARROW_CODECS[ending]) if ending in _ARROW_CODECS else file
        if ending == ".xz":
            stream = _XzReader(file)
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
        encoding = encoding_of(file)
        if encoding in (None, "utf-8-sig"):
            yield file
            return
        # What is no character becomes the byte 0xFF, never in UTF-8, about which `corpus.invalid_utf8` decides.
        text = file.read().decode(str(encoding), "replace").replace("\ufffd", "\udcff")
        yield io.BufferedReader(io.BytesIO(text.encode("utf-8", "surrogateescape")))


def encoding_of(file: io.BufferedReader[Any]) -> str | None:
    """Return the codec of the byte-order mark that a file begins with. Nothing is consumed."""
    start = file.peek(4)
    return next((name for mark, name in _ENCODING_OF_MARK.items() if start.startswith(mark)), None)


@contextmanager
def open_seekable_file(uri: str) -> Iterator[BinaryIO]:
    """Open a file for reading at any position. It is not decompressed."""
    with as_artifact_error(uri), fsspec.core.OpenFile(*find_file_system(uri)) as file:
        yield file


def read_file(uri: str) -> bytes:
    """Return a file's content. Raises `ArtifactError` for a pointer of Git LFS."""
    with open_file(uri) as file:
        content = file.read()
    require_no_lfs_pointer(uri, content)
    return content


def require_no_lfs_pointer(uri: str, content: bytes) -> None:
    """Raise `ArtifactError` for the content of a file in whose place Git has left a pointer."""
    if content.startswith(_LFS_MARK):
        folder = shlex.quote(str(Path(uri).parent))
        raise ArtifactError(f"{uri}: a pointer of Git LFS, not the file. Fetch the files: `git -C {folder} lfs pull`.")


def is_local(file_system: Any) -> bool:
    """Return whether a file system of fsspec is the one of this machine."""
    return isinstance(file_system, fsspec.implementations.local.LocalFileSystem)


def is_compressed(path: str) -> bool:
    """Return whether `open_file` decompresses a file, by its name's extension."""
    return path.lower().endswith((*_ARROW_CODECS, *_FSSPEC_CODECS, ".xz"))


def stat_file(file_system: Any, path: str) -> tuple[int, str]:
    """Return size and version of a file: by its status, or by one request."""
    if is_local(file_system):
        return describe_status(Path(path).stat())
    file_system.invalidate_cache(path)
    return describe_info(file_system.info(path))


def describe_status(status: os.stat_result) -> tuple[int, str]:
    """Return size and version of a local file."""
    return status.st_size, f"{status.st_size} bytes, {status.st_mtime_ns} ns"


def describe_info(info: Mapping[str, Any]) -> tuple[int, str]:
    """Return size and version of a remote file by what its store tells. A web server may not tell the size."""
    size = int(info.get("size") or 0)
    facts = {"".join(filter(str.isalnum, name.lower())): value for name, value in info.items() if value is not None}
    time = next((_show_time(facts[name]) for name in _TIMES if name in facts), "")
    tag = next((str(facts[name]) for name in _TAGS if name in facts), "")
    return size, ", ".join(filter(None, (version_of_size(size), time, tag)))


def version_of_size(num_bytes: int) -> str:
    """Return the version of a remote file whose store tells its size alone."""
    return f"{num_bytes} bytes"


@contextmanager
def require_unchanged(file: InputFile) -> Iterator[None]:
    """Raise `ArtifactError` when the file at the end of this block has another version than the listed one.

    It replaces an error in the block, which the change explains.
    """
    failure = None
    try:
        yield
    except ArtifactError as error:
        failure = error
    with as_artifact_error(file.uri):
        _, version = stat_file(*find_file_system(file.uri))
    if version != file.version:
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
