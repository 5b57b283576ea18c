"""Tells whether an input file has changed, by facts that no read is needed for.

A local file is known by its size and modification time, and a remote one by its size, time and ETag. So a copy that
keeps the time is the same file, as it is for make and rsync, and every node of a cluster may read its own copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from services.common.errors import ArtifactError
from services.tokenizer.sources.file_range import InputFile
from services.tokenizer.sources.file_system import explain_read_errors, find_file_system, is_local_file_system

# Names that file systems give to these facts in `info`, in small letters and without separators. The first name counts:
# a store may add further facts to the answer about one file that are not in its list of files.
_TAGS = ("etag", "md5hash", "contentmd5", "digest", "blobid", "checksum", "crc32c", "generation")
_TIMES = ("lastmodified", "mtime", "modified", "updated", "timemodified", "modify", "created")


def version_of_status(status: os.stat_result) -> str:
    """Return the version of a local file."""
    return f"{status.st_size} bytes, {status.st_mtime_ns} ns"


def version_of_facts(info: Mapping[str, Any]) -> str | None:
    """Return the version of a remote file by the facts of its store; None where neither a time nor a tag is given."""
    facts = {"".join(filter(str.isalnum, name.lower())): value for name, value in info.items() if value is not None}
    tag = next((str(facts[name]) for name in _TAGS if name in facts), "")
    time = next((_show_time(facts[name]) for name in _TIMES if name in facts), "")
    return ", ".join(filter(None, (version_of_size(info), time, tag))) if tag or time else None


def _show_time(time: Any) -> str:
    """Show a time alike whether a file system gives it as a datetime or, in a list of files, as seconds since 1970."""
    seconds = time.timestamp() if isinstance(time, datetime) else time
    return f"{seconds:.6f} s" if isinstance(seconds, int | float) else str(time)


def version_of_size(info: Mapping[str, Any]) -> str:
    """Return the version of a remote file whose store tells its size alone."""
    return f"{size_of(info)} bytes"


def size_of(info: Mapping[str, Any]) -> int:
    """Return the bytes of a remote file, or 0 where a web server does not tell."""
    return int(info.get("size") or 0)


def find_version(uri: str) -> str:
    """Ask the file system for the present version of a file: one status or one request."""
    file_system, path = find_file_system(uri)
    with explain_read_errors(uri):
        if is_local_file_system(file_system):
            return version_of_status(Path(path).stat())
        file_system.invalidate_cache(path)
        info = file_system.info(path)
        return version_of_facts(info) or version_of_size(info)


@contextmanager
def require_unchanged(file: InputFile) -> Iterator[None]:
    """Raise `ArtifactError` when the file at the end of this block has another version than the listed one.

    Otherwise a corpus could hold two versions of a file. An error in the block that a change explains is replaced.
    """
    try:
        yield
    except ArtifactError as error:
        if find_version(file.uri) != file.version:
            raise _changed(file) from error
        raise
    if find_version(file.uri) != file.version:
        raise _changed(file)


def _changed(file: InputFile) -> ArtifactError:
    return ArtifactError(
        f"{file.uri}: the file changed while the corpus was made from it. Nothing was published. "
        f"Run the same command again when the file is complete."
    )
