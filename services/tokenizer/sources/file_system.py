"""Files on any file system that fsspec knows: find them, tell whether they changed, open them."""

from __future__ import annotations

import glob
import io
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import fsspec.core
import fsspec.implementations.local
import fsspec.utils
import pyarrow as pa

from services.common.artifacts.files import xxh3_of
from services.common.errors import ArtifactError, DeviceError, RecipeError
from services.common.recipe import Source, fingerprint
from services.tokenizer.sources.piece import Format, InputFile

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
# Arrow's decompression says when a file is cut off, which Python's zstandard does not, and is three times gzip's speed.
_ARROW_CODEC_BY_ENDING = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"}
_BUFFER_BYTES = 2**20
_HASHING_THREADS = 4
# What file systems call a checksum, a version or a time of change in the facts they give about a file.
_VERSION_FACTS = (
    "etag",
    "md5",
    "checksum",
    "digest",
    "crc32c",
    "generation",
    "version",
    "modified",
    "mtime",
    "blob_id",
)


def list_files(source: Source) -> list[InputFile]:
    """The files that a path, folder or glob stands for, sorted by path, each with its format and digest.

    Raises `ArtifactError` when there are none and `RecipeError` when a format cannot be told.
    """
    file_system, path = find_file_system(source.uri)
    with explain_read_errors(source.uri):
        base, paths = _expand(file_system, path, source.uri)
        chosen = _choose_formats(source, paths)
        return _describe(file_system, chosen, base, source.column)


def list_paths(uris: list[str], base: str, file_format: Format, column: str) -> list[InputFile]:
    """Files of one file system that are known already, in the order given."""
    file_system, _ = find_file_system(uris[0])
    paths = [find_file_system(uri)[1] for uri in uris]
    with explain_read_errors(base):
        return _describe(file_system, dict.fromkeys(paths, file_format), base, column)


def find_file_system(uri: str) -> tuple[Any, str]:
    """The fsspec file system of a URI, and the path in it. Raises `DeviceError` when its package is missing."""
    protocol = uri.partition("://")[0]
    try:
        file_system, path = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        raise DeviceError(f"{uri}: a package that reads {protocol}:// is missing: {error}.") from error
    except ValueError as error:
        raise DeviceError(
            f"{uri}: no file system called {protocol!r}. Install the fsspec package that provides it, or "
            f"use one of: file, http, s3, gs, hf (`python -c 'import fsspec; print(fsspec.available_protocols())'`)."
        ) from error
    return file_system, path


@contextmanager
def open_file(uri: str) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; what its ending says is compressed is decompressed."""
    codec = _ARROW_CODEC_BY_ENDING.get(PurePosixPath(uri).suffix.lower())
    try:
        opened = fsspec.open(uri, mode="rb", compression=None if codec else "infer")
    except ValueError as error:
        raise DeviceError(f"{uri}: this Python cannot decompress it ({error}).") from error
    with explain_read_errors(uri), opened as file:
        if codec is None:
            yield file
            return
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec) as stream:
            yield io.BufferedReader(stream, _BUFFER_BYTES)


@contextmanager
def require_unchanged(file: InputFile) -> Iterator[None]:
    """Raise `ArtifactError` when the file is written between its listing and the end of this block.

    That goes by the file's stamp: what was published under a digest that was taken before would else be other text.
    """
    changed = ArtifactError(
        f"{file.uri}: changed while the corpus was made from it, so nothing was published. "
        f"Run the same command again when it is complete: it takes the file as it is then."
    )
    try:
        yield
    except ArtifactError as error:
        if _stamp(file.uri) != file.stamp:
            raise changed from error
        raise
    if _stamp(file.uri) != file.stamp:
        raise changed


def stamp_of_file(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


@contextmanager
def explain_read_errors(uri: str) -> Iterator[None]:
    """An input that cannot be read is a bad input, not a full disk: raise it as `ArtifactError`."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ArtifactError(f"{uri}: cannot be read: {reason}.") from error


def is_compressed(uri: str) -> bool:
    suffix = PurePosixPath(uri).suffix.lower()
    return suffix in _ARROW_CODEC_BY_ENDING or fsspec.utils.infer_compression(uri) is not None


def _expand(file_system: Any, path: str, uri: str) -> tuple[str, list[str]]:
    """The files behind a path, sorted, and the folder that their names are relative to."""
    if file_system.isfile(path):
        return str(PurePosixPath(path).parent), [path]
    if file_system.isdir(path):
        found = [each for each in file_system.find(path) if not _is_hidden(each.removeprefix(path))]
        base = path
    elif glob.has_magic(path):
        found = [each for each in file_system.glob(path) if file_system.isfile(each)]
        base = path[: next(index for index, char in enumerate(path) if char in "*?[")].rpartition("/")[0]
    else:
        raise ArtifactError(
            f"{uri}: no such file or folder. corpus.sources names it; relative paths start at {Path.cwd()}."
        )
    if not found:
        raise ArtifactError(f"{uri}: no file there. corpus.sources names it; relative paths start at {Path.cwd()}.")
    return base, sorted(found)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _choose_formats(source: Source, paths: list[str]) -> dict[str, Format]:
    if source.format != "auto":
        return dict.fromkeys(paths, source.format)
    chosen = {path: FORMAT_BY_ENDING[_ending(path)] for path in paths if _ending(path) in FORMAT_BY_ENDING}
    skipped = [path for path in paths if path not in chosen]
    if not chosen:
        raise RecipeError(
            f"{source.uri}: format 'auto' knows the endings {_KNOWN_ENDINGS}; found {_count_endings(skipped)}. "
            f'Say format = "text", "jsonl" or "parquet" for this source.'
        )
    if skipped:
        logger.warning(
            "%s: %d files skipped whose endings format 'auto' does not know: %s",
            source.uri, len(skipped), _count_endings(skipped),
        )  # fmt: skip
    return chosen


def _ending(path: str) -> str:
    suffixes = PurePosixPath(path).suffixes
    if suffixes and is_compressed(path):
        suffixes.pop()
    return suffixes[-1].lower() if suffixes else ""


def _count_endings(paths: list[str]) -> str:
    counts = Counter(PurePosixPath(path).suffix or "none" for path in paths)
    return ", ".join(f"{ending} ({count})" for ending, count in counts.most_common(6))


def _describe(file_system: Any, chosen: dict[str, Format], base: str, column: str) -> list[InputFile]:
    def describe(path: str) -> InputFile:
        size, digest, stamp = _identify(file_system, path)
        return InputFile(
            uri=_uri_of(file_system, path),
            name=path.removeprefix(base).lstrip("/"),
            format=chosen[path],
            column=column,
            bytes=size,
            digest=digest,
            stamp=stamp,
        )

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(describe, chosen))


def _identify(file_system: Any, path: str) -> tuple[int, str, str]:
    """Size, digest and stamp of a file: of its content where that is local, else of what the store says."""
    if _is_local(file_system):
        stamp = stamp_of_file(Path(path))  # before the content: what is written meanwhile changes it
        return Path(path).stat().st_size, xxh3_of(Path(path)), stamp
    info = file_system.info(path)
    facts = {key: str(info[key]) for key in info if any(fact in key.lower() for fact in _VERSION_FACTS)}
    size = int(info.get("size") or 0)
    digest = fingerprint({"ukey": file_system.ukey(path) if not facts else "", "size": size, **facts})
    return size, digest, digest


def _stamp(uri: str) -> str:
    file_system, path = find_file_system(uri)
    with explain_read_errors(uri):
        if _is_local(file_system):
            return stamp_of_file(Path(path))
        file_system.invalidate_cache(path)
        return _identify(file_system, path)[2]


def _is_local(file_system: Any) -> bool:
    return isinstance(file_system, fsspec.implementations.local.LocalFileSystem)


def _uri_of(file_system: Any, path: str) -> str:
    return path if _is_local(file_system) else str(file_system.unstrip_protocol(path))
