"""Sends small files from a command in a container to the caller, as lines of the command's output.

A line is `millrace-file <file>/<part>/<parts> <payload>`. Part 0 names the file; the other parts are its content,
compressed and in base64. Container runtimes cut lines of more than 16 KiB, and kubelet rotates a container's log at
10 MiB: the bounds of this module stay well below both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import RecipeError
from services.common.input.files import read_file

PREFIX = "millrace-file "
PART_CHARACTERS = 8_192
MOST_PACKED_BYTES = 4 * 2**20
"""Largest file in bytes after compression. A trainer's report of 5 MB is compressed to 1.5 MB."""
MOST_BYTES = 64 * 2**20
"""Largest file in bytes before compression: a few compressed bytes can expand to gigabytes."""
_LINE = re.compile(rf"{PREFIX}([0-9]{{1,4}})/([0-9]{{1,4}})/([0-9]{{1,4}}) (\S+)")

_offered: list[Path] = []


def offer_file(path: Path) -> None:
    """Offer a small file that a command made for a person: from a cluster it is sent to the caller."""
    _offered.append(path)


def offered_files() -> list[Path]:
    """The files that the command of this process has offered, in order."""
    return list(_offered)


def pack_file(path: Path, number: int) -> Iterator[str]:
    """Yield the lines that carry a file; `number` distinguishes the files of one command.

    Raises `RecipeError` for a path that does not exist or is not a regular file, and for a file that is too large.
    """
    try:
        content = read_file(path, max_bytes=MOST_BYTES)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read, so it is not sent: {error.strerror}.") from error
    packed = zlib.compress(content, level=9)
    if len(packed) > MOST_PACKED_BYTES:
        raise RecipeError(
            f"{path}: has {len(packed):,} bytes after compression ({len(content):,} before), and at most "
            f"{MOST_PACKED_BYTES:,} are sent. Read the file on the shared file system."
        )
    head = {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = base64.b64encode(packed).decode("ascii")
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    for part, payload in enumerate([base64.b64encode(json.dumps(head).encode()).decode("ascii"), *parts]):
        yield f"{PREFIX}{number}/{part}/{len(parts)} {payload}"


@dataclass(frozen=True)
class BroughtFile:
    """A file that the caller has received."""

    name: str
    content: bytes


class FileReceiver:
    """Reassembles files from the lines of an output, in which lines may be repeated."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, str]] = {}
        self._counts: dict[int, int] = {}

    def take(self, line: str) -> bool:
        """Keep a line that is a part of a file; return whether the line is one."""
        found = _LINE.fullmatch(line.rstrip("\r\n"))
        if not found:
            return False
        number, part, count = (int(each) for each in found.groups()[:3])
        self._counts[number] = count
        self._parts.setdefault(number, {})[part] = found[4]
        return True

    def files(self) -> tuple[list[BroughtFile], list[str]]:
        """Return the complete files, and a message for every other file."""
        whole: list[BroughtFile] = []
        problems: list[str] = []
        for number, parts in sorted(self._parts.items()):
            try:
                whole.append(_unpack(parts, self._counts[number]))
            except ValueError as error:
                problems.append(f"file {number + 1} was not received completely: {error}")
        return whole, problems


def _unpack(parts: dict[int, str], count: int) -> BroughtFile:
    """Decode a file. Raises `ValueError` where parts are missing or were changed on the way."""
    lacking = [part for part in range(count + 1) if part not in parts]
    if lacking:
        raise ValueError(f"{len(lacking)} of {count + 1} lines are missing")
    try:
        head = json.loads(base64.b64decode(parts[0], validate=True))
        packed = base64.b64decode("".join(parts[part] for part in range(1, count + 1)), validate=True)
        unfolding = zlib.decompressobj()
        content = unfolding.decompress(packed, MOST_BYTES)
        name, digest = str(head["name"]), str(head["sha256"])
    except (binascii.Error, ValueError, zlib.error, KeyError, TypeError) as error:
        raise ValueError(f"the lines cannot be decoded ({error})") from error
    if not unfolding.eof or hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("the content does not match its checksum")
    if Path(name).name != name or name.startswith("."):
        raise ValueError(f"{name[:60]!r} is not a plain file name")
    return BroughtFile(name, content)
