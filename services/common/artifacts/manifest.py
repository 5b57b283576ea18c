"""Reads and writes `manifest.json`: the header that every artifact has, and one typed payload for each kind.

A directory without `manifest.json` is unpublished. The manifest lists every other file with its size and checksums, the
inputs and the program that made the artifact, so that a reader needs nothing else to trust it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from services.common.errors import ArtifactError, shell_command, unreadable
from services.common.problem_list import list_names, list_problems
from services.common.process.progress import report_phase
from services.common.recipe.schema import fingerprint
from services.common.version import read_commit, read_version

MANIFEST = "manifest.json"


def _require_relative(path: str) -> str:
    if path == MANIFEST or path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"{path!r} is not a relative path inside the artifact, such as 'train/shard-000000.arrow'")
    return path


RelativePath = Annotated[str, AfterValidator(_require_relative)]
"""Path below the artifact's folder, with forward slashes."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ManifestModel(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", populate_by_name=True)


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class FileEntry:
    """Size and checksums of one file of an artifact.

    Not a model, whose instances have two dictionaries each: 0.5 GB for 300,000 files.
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
    schema_id: Annotated[str, Field(alias="schema")]
    path: str
    id: str
    content_digest: str


class Producer(ManifestModel):
    service: str
    version: str
    git_sha: str
    image: str


class Phase(ManifestModel):
    """A timed part of a stage's work. The report draws it in its timeline."""

    name: str
    started_at: AwareDatetime
    seconds: Annotated[float, Field(ge=0)]


class PhaseTimer:
    """Times the phases of a stage for its manifest, and reports them as its progress."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_at, start = datetime.now(UTC), time.perf_counter()
        with report_phase(name):
            yield
        self.phases.append(Phase(name=name, started_at=started_at, seconds=round(time.perf_counter() - start, 3)))


class Manifest(ManifestModel):
    """The header of every artifact. Each kind derives from it and adds a payload under the kind's own name."""

    SCHEMA: ClassVar[str]

    schema_id: Annotated[str, Field(alias="schema")]
    name: str
    id: str
    identity_key: str
    """Hash of the recipe's identity fields for this kind, by which a stage finds the artifact of its recipe."""
    created_at: AwareDatetime
    producer: Producer
    inputs: tuple[InputLink, ...]
    recipe: dict[str, Any]
    files: tuple[FileEntry, ...]

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
        return fingerprint([entry.to_json() for entry in self.files])

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
                f"{path}: schema {raw.get('schema')!r}, this program reads {cls.SCHEMA!r}. "
                f"Point to an artifact of that schema, or run the version of Millrace that wrote this one."
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
            lines = [each.replace("Value error, ", "") for each in list_problems(problems, "problems")]
            raise ArtifactError("\n  ".join([f"{path}: does not follow {cls.SCHEMA}:", *lines])) from error

    def write(self, folder: Path) -> None:
        """Write `manifest.json` in one atomic step; it is on disk when this returns."""
        raw = self.model_dump(mode="json", by_alias=True)
        write_durably(folder / MANIFEST, json.dumps({**raw, "seal": fingerprint(raw)}, indent=1).encode() + b"\n")


def read_sealed(folder: Path) -> dict[str, Any]:
    """Return the fields of a manifest of any schema. Raises `ArtifactError` where it is absent or damaged."""
    path = folder / MANIFEST
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        seal = raw.pop("seal")
        found = fingerprint(raw)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactError(
            f"{folder}: not a published artifact (no {MANIFEST}). "
            f"`{shell_command('services.common.artifacts', 'list')} ROOT` shows what is published below a root."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ArtifactError(
            f"{path}: damaged: not a sealed manifest ({error}). Move the folder away and run the stage again."
        ) from error
    if seal != found:
        raise ArtifactError(
            f"{path}: damaged: its content hashes to {found[:12]}, the seal says {str(seal)[:12]}. Move the folder "
            f"away and run the stage again."
        )
    return raw


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically; both the bytes and the name are on disk when this returns."""
    # Not a pid: writers in two containers have the same one.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
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


def describe_producer(service: str) -> Producer:
    """Describe the program that writes: the stage's version, the source's commit, and the image's name, if any."""
    image = os.environ.get("MILLRACE_IMAGE", "none")
    return Producer(service=service, version=read_version(service), git_sha=read_commit(), image=image)
