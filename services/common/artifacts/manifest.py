"""Reads and writes `manifest.json`: the header that every artifact has, and one typed payload for each kind.

A folder without a manifest does not exist. The manifest lists every other file with its size and checksums, the inputs
and the program that made the artifact, so that a reader needs nothing else to trust it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic.dataclasses import dataclass

from services.common.errors import ArtifactError, RecipeError, UnreadableError
from services.common.input.credentials import mask
from services.common.input.files import parse_json, read_file, unreadable
from services.common.input.problem_list import ProblemList, list_names, shorten
from services.common.recipe.schema import fingerprint

MANIFEST = "manifest.json"
MAX_FILES = 300_000
"""Most files of an artifact: `parse_json` reads no manifest that lists more."""
_MAX_BYTES = 2**27
_SLICE = 1_000
"""Entries of a list that pydantic checks at a time, so that the errors of a million bad entries never exist at once."""


_PLAIN_PATH = re.compile(r"(?:[a-z0-9_][a-z0-9_.-]{0,99}/){0,9}[a-z0-9_][a-z0-9_.-]{0,99}", re.ASCII | re.IGNORECASE)
"""Paths that need no closer look, which are those of shards: a manifest may have 300,000."""


def _require_relative(path: str) -> str:
    if _PLAIN_PATH.fullmatch(path) and path != MANIFEST:
        return path
    if len(path.encode()) > 4_000 or any(
        part in ("", ".", "..") or len(part.encode()) > 255 for part in path.split("/")
    ):
        raise ValueError(f"{path[:200]!r} is no path below the artifact's folder, such as 'train/shard-000000.arrow'")
    if "\\" in path or not path.isprintable():
        raise ValueError(f"{path[:200]!r} has a backslash or an unprintable character")
    if path == MANIFEST:
        raise ValueError("a manifest cannot list itself")
    return path


RelativePath = Annotated[str, AfterValidator(_require_relative)]
"""Path below the artifact's folder, with forward slashes. `files.listed_file` opens the file."""
Text = Annotated[str, Field(max_length=10_000)]
"""A name, an id or an address. Its length is bounded because the search for credentials takes time by length."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def _check_slice_by_slice(values: Any, check: ValidatorFunctionWrapHandler) -> tuple[Any, ...]:
    """Return the list as `check` returns it, called with one slice after the other."""
    if not isinstance(values, (list, tuple)) or len(values) <= _SLICE:
        return tuple(check(values))
    if len(values) > MAX_FILES:
        raise ValueError(f"{len(values):,} entries, expected at most {MAX_FILES:,}")
    checked: list[Any] = []
    problems = ProblemList()
    for begin in range(0, len(values), _SLICE):
        try:
            checked += check(values[begin : begin + _SLICE])
        except ValidationError as error:
            checked.clear()
            for each in error.errors(include_url=False):
                place, *below = each["loc"]
                problems.add(each["type"], _locate(begin + int(place), *below) + f": {each['msg']}")
    if problems:
        raise ValueError("".join(f"\n    {line}" for line in problems.lines()))
    return tuple(checked)


def _locate(*parts: str | int) -> str:
    return ".".join(map(str, parts))


Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], WrapValidator(_check_slice_by_slice)]
"""A list in a manifest that can be long."""


class ManifestModel(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", populate_by_name=True)


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class FileEntry:
    """Size and checksums of one file of an artifact.

    Not a model, whose instances have two dictionaries each: 0.5 GB for the 300,000 files that a manifest can list.
    """

    path: RelativePath
    bytes: Count
    xxh3_128: Xxh3
    """Checksum that readers compare: 24 GB/s on a core, where sha256 reaches 1.8."""
    sha256: Sha256
    """Checksum that is recorded for provenance."""

    def to_json(self) -> dict[str, str | int]:
        """Return the fields as a manifest has them, in a tenth of the time that `dataclasses.asdict` takes."""
        return {"path": self.path, "bytes": self.bytes, "xxh3_128": self.xxh3_128, "sha256": self.sha256}


class InputLink(ManifestModel):
    schema_id: Annotated[Text, Field(alias="schema")]
    path: Annotated[Text, AfterValidator(mask)]
    id: Text
    content_digest: Text


class Producer(ManifestModel):
    service: Text
    version: Text
    git_sha: Text
    image: Text


class Phase(ManifestModel):
    """A timed part of a stage's work. The report draws it in its timeline."""

    name: Text
    started_at: AwareDatetime
    seconds: Annotated[float, Field(ge=0)]


class Manifest(ManifestModel):
    """The header of every artifact. Each kind derives from it and adds a payload under the kind's own name."""

    SCHEMA: ClassVar[str]

    schema_id: Annotated[Text, Field(alias="schema")]
    name: Text
    id: Text
    identity_key: Text
    """Hash of the recipe's identity fields for this kind, by which a stage finds the artifact of its recipe."""
    created_at: AwareDatetime
    producer: Producer
    inputs: Many[InputLink]
    recipe: dict[str, Any]
    files: Many[FileEntry]

    @field_validator("files")
    @classmethod
    def _lists_a_file_once(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        path, times = Counter(entry.path for entry in files).most_common(1)[0] if files else ("", 0)
        if times > 1:
            raise ValueError(f"{path} is listed {times} times")
        return files

    def require_listed(self, paths: Collection[str]) -> None:
        """Raise `ValueError` for a path that `files` does not list, whose content nobody could check."""
        unlisted = sorted(set(paths) - {entry.path for entry in self.files})
        if unlisted:
            raise ValueError(f"{list_names(unlisted)}: not among the files that the manifest lists")

    @property
    def kind(self) -> str:
        return self.schema_id.split("/")[0]

    @property
    def content_digest(self) -> str:
        """Hash of the files alone, without dates and producer. Links between artifacts name this digest."""
        return content_digest(self.files)

    def link(self, path: Path) -> InputLink:
        return InputLink(schema_id=self.schema_id, path=str(path), id=self.id, content_digest=self.content_digest)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Parse and check `folder/manifest.json`; `verify_files` checks the files that it lists.

        Raises `ArtifactError` where the manifest is absent, damaged or of another kind.
        """
        return cls.parse(read_sealed(folder), folder / MANIFEST)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], path: Path) -> Self:
        """Check the fields that `read_sealed` returned of the manifest at `path`, as `read` does."""
        if raw.get("schema") != cls.SCHEMA:
            raise ArtifactError(
                f"{path}: schema {shorten(repr(raw.get('schema')), 200)}, this program reads {cls.SCHEMA!r}. "
                f"Point to an artifact of that schema, or run the version of Millrace that wrote this one."
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ArtifactError(f"{path}: does not follow {cls.SCHEMA}:{_explain(error)}") from error

    def write(self, folder: Path) -> None:
        """Write `manifest.json` in one atomic step; it is on disk when this returns.

        Raises `RecipeError` for more than MAX_FILES files.
        """
        require_listable(len(self.files))
        raw = self.model_dump(mode="json", by_alias=True)
        write_durably(folder / MANIFEST, json.dumps({**raw, "seal": fingerprint(raw)}, indent=1).encode() + b"\n")


def require_listable(num_files: int) -> None:
    """Raise `RecipeError` for more files than a manifest can list."""
    if num_files > MAX_FILES:
        raise RecipeError(
            f"{num_files:,} files, and a manifest lists at most {MAX_FILES:,}. For a corpus, raise "
            f"corpus.rows_per_shard, which makes fewer shards."
        )


class Header(BaseModel):
    """The fields of any kind's manifest by which the newest artifact of a recipe is found."""

    model_config = ConfigDict(frozen=True)

    identity_key: str
    created_at: AwareDatetime

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the header of `folder/manifest.json`. Raises `ArtifactError` where it is absent or damaged."""
        try:
            return cls.model_validate(read_sealed(folder))
        except ValidationError as error:
            raise ArtifactError(f"{folder / MANIFEST}: not a manifest of Millrace:{_explain(error)}") from error


_MAKE_AGAIN = "Move the folder away and run the stage again."


def read_sealed(folder: Path) -> dict[str, Any]:
    """Return the fields of a manifest of any schema. Raises `ArtifactError` where it is absent or damaged."""
    path = folder / MANIFEST
    try:
        raw = parse_json(read_file(path, folder, _MAX_BYTES))
        files = raw.get("files")
        if isinstance(files, list) and len(files) > MAX_FILES:  # its seal would take as much memory again
            raise ValueError(f"it lists {len(files):,} files, expected at most {MAX_FILES:,}")
        seal = raw.pop("seal")
        found = fingerprint(raw)
    except (FileNotFoundError, NotADirectoryError) as error:
        require_mounted(folder)
        raise ArtifactError(
            f"{folder}: not a published artifact (no {MANIFEST}). "
            f"`python -m services.common.artifacts list ROOT` shows what is published below a root."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged: not a sealed manifest ({shorten(str(error))}). {_MAKE_AGAIN}") from error
    if seal != found:
        raise ArtifactError(
            f"{path}: damaged: its content hashes to {found[:12]}, the seal says {str(seal)[:12]}. {_MAKE_AGAIN}"
        )
    return dict(raw)


def is_dangling(path: Path) -> bool:
    """Tell whether `path` is a link that leads nowhere."""
    return path.is_symlink() and not path.exists()


def require_mounted(path: Path) -> None:
    """Raise `UnreadableError` where `path` is a link that leads nowhere: what it leads to may be on another disk."""
    if is_dangling(path):
        raise UnreadableError(
            f"{path}: a link to {path.readlink()}, which does not exist. Mount its disk, or remove the link."
        )


def _explain(error: ValidationError) -> str:
    problems = ProblemList()
    for each in error.errors(include_url=False):
        problems.add(each["type"], _locate(*each["loc"]) + f": {each['msg']}")
    return "".join(f"\n  {line}" for line in problems.lines())


def content_digest(files: tuple[FileEntry, ...]) -> str:
    return fingerprint([entry.to_json() for entry in files])


def write_durably(path: Path, content: bytes, fence: Callable[[], None] = lambda: None) -> None:
    """Replace `path` by `content` atomically; both the bytes and the name are on disk when this returns.

    `fence` is called immediately before; an error that it raises leaves `path` as it was.
    """
    # Not a pid: writers in two containers have the same one.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fence()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def producer(service: str) -> Producer:
    """Describe the program that writes: the stage's version, the source's commit, and the image's name, if any."""
    source_root = Path(__file__).resolve().parents[3]
    version = (source_root / "services" / service / "VERSION").read_text(encoding="utf-8").strip()
    git_sha = os.environ.get("MILLRACE_GIT_SHA") or _git_sha(source_root)
    return Producer(service=service, version=version, git_sha=git_sha, image=os.environ.get("MILLRACE_IMAGE", "none"))


def _git_sha(source_root: Path) -> str:
    if not (source_root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(source_root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
