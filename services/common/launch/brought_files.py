"""Small files that a command in a container brings home: they travel as lines of its output.

A line is `millrace-file <file>/<part>/<parts> <payload>`. Part 0 names the file; the others are its content, compressed
and in base64. Container runtimes cut lines of more than 16 KiB, and kubelet rotates a container's log at 10 MiB: the
bounds here stay well below.
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
"""Bytes of a file that travels, once it is compressed. A trainer's report of 5 MB has 1.5 MB of them."""
MOST_BYTES = 64 * 2**20
"""Bytes of a file that travels. A few bytes can be packed so that they unfold to gigabytes."""
_LINE = re.compile(rf"{PREFIX}([0-9]{{1,4}})/([0-9]{{1,4}})/([0-9]{{1,4}}) (\S+)")

_offered: list[Path] = []


def offer_file(path: Path) -> None:
    """Offer a small file that a command made for a person: where the command runs on a cluster, it is brought home."""
    _offered.append(path)


def offered_files() -> list[Path]:
    """The files that this process' command has offered, in their order."""
    return list(_offered)


def pack_file(path: Path, number: int) -> Iterator[str]:
    """The lines in which the file travels; `number` tells it from others of the same command.

    Raises `RecipeError` for a file that is not there, is none, or is too large.
    """
    try:
        content = read_file(path, max_bytes=MOST_BYTES)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be brought home: {error.strerror}. It stays where it is.") from error
    packed = zlib.compress(content, level=9)
    if len(packed) > MOST_PACKED_BYTES:
        raise RecipeError(
            f"{path}: has {len(content):,} bytes, compressed {len(packed):,}, and a file that is brought home has at "
            f"most {MOST_PACKED_BYTES:,} of these. It stays where it is, on the shared file system."
        )
    head = {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = base64.b64encode(packed).decode("ascii")
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    for part, payload in enumerate([base64.b64encode(json.dumps(head).encode()).decode("ascii"), *parts]):
        yield f"{PREFIX}{number}/{part}/{len(parts)} {payload}"


@dataclass(frozen=True)
class BroughtFile:
    """A file that has arrived."""

    name: str
    content: bytes


class FileReceiver:
    """Puts files together again from the lines of an output, of which some may come twice."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, str]] = {}
        self._counts: dict[int, int] = {}

    def take(self, line: str) -> bool:
        """Keep the line where it is a part of a file; False for any other line."""
        found = _LINE.fullmatch(line.rstrip("\r\n"))
        if not found:
            return False
        number, part, count = (int(each) for each in found.groups()[:3])
        self._counts[number] = count
        self._parts.setdefault(number, {})[part] = found[4]
        return True

    def files(self) -> tuple[list[BroughtFile], list[str]]:
        """Those that are whole, and what is wrong with each of the others."""
        whole: list[BroughtFile] = []
        problems: list[str] = []
        for number, parts in sorted(self._parts.items()):
            try:
                whole.append(_unpack(parts, self._counts[number]))
            except ValueError as error:
                problems.append(f"file {number + 1} did not arrive whole: {error}")
        return whole, problems


def _unpack(parts: dict[int, str], count: int) -> BroughtFile:
    """Raises `ValueError` for parts that are lacking or are not what was sent."""
    lacking = [part for part in range(count + 1) if part not in parts]
    if lacking:
        raise ValueError(f"{len(lacking)} of {count + 1} lines are lacking")
    try:
        head = json.loads(base64.b64decode(parts[0], validate=True))
        packed = base64.b64decode("".join(parts[part] for part in range(1, count + 1)), validate=True)
        unfolding = zlib.decompressobj()
        content = unfolding.decompress(packed, MOST_BYTES)
        name, digest = str(head["name"]), str(head["sha256"])
    except (binascii.Error, ValueError, zlib.error, KeyError, TypeError) as error:
        raise ValueError(f"its lines are damaged ({error})") from error
    if not unfolding.eof or hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("its content is not that of its checksum")
    if Path(name).name != name or name.startswith("."):
        raise ValueError(f"{name[:60]!r} is no plain name of a file")
    return BroughtFile(name, content)
