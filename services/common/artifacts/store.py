"""Where artifacts live, how one is published exactly once, and how a stage finds the one it needs.

Layout: `<root>/<kind>/<name>/<id>/`. Work in progress is `<id>.partial/` (what will be published) and
`<id>.scratch/` (what only helps to make it), both guarded by the lease `<id>.lock`. The rename of the
complete partial folder to `<id>/` is the commit.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from services.common.artifacts.files import describe_files, verify_files
from services.common.artifacts.lease import Lease, hold_lease
from services.common.artifacts.manifest import (
    MANIFEST,
    InputLink,
    Manifest,
    now,
    producer,
    read_sealed,
    sync_folder,
    write_durably,
)
from services.common.errors import ArtifactError, naming_the_place
from services.common.recipe import Kind, Recipe, fingerprint, identity

logger = logging.getLogger(__name__)

CURRENT = "current.json"
PARTIAL_SUFFIX = ".partial"
SCRATCH_SUFFIX = ".scratch"
LOCK_SUFFIX = ".lock"

M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class Address:
    """The place of one artifact, published or not."""

    root: Path
    kind: Kind
    name: str
    id: str

    @property
    def shelf(self) -> Path:
        """The folder of all artifacts of this kind and name."""
        return self.root / self.kind / self.name

    @property
    def path(self) -> Path:
        return self.shelf / self.id

    def beside(self, suffix: str) -> Path:
        return self.shelf / f"{self.id}{suffix}"


@dataclass(frozen=True)
class Artifact(Generic[M]):
    """A published folder and its manifest."""

    path: Path
    manifest: M


@dataclass(frozen=True)
class Draft:
    """What a stage says about the folder that it has filled, for the manifest."""

    payload: Any
    inputs: tuple[InputLink, ...] = ()


@dataclass(frozen=True)
class Workspace:
    """The folders a stage fills while it holds the lease. Both survive a crash, so work in them can be resumed."""

    files: Path
    scratch: Path


def artifact_id(recipe: Recipe, kind: Kind, content_version: int, input_digests: Sequence[str]) -> str:
    """Identity of what a stage would make: its recipe fields, its inputs' bytes and its content version."""
    parts = {"recipe": identity(recipe, kind), "content_version": content_version, "inputs": list(input_digests)}
    return fingerprint(parts)[:16]


def identity_key(recipe: Recipe, kind: Kind) -> str:
    return fingerprint(identity(recipe, kind))


def publish_once(
    address: Address,
    manifest_type: type[M],
    service: str,
    recipe: Recipe,
    build: Callable[[Workspace], Draft],
) -> tuple[Artifact[M], bool]:
    """Return the artifact at `address`, building and committing it unless it is published already.

    The second value says whether this call made it. Of two callers at once, one builds; the other waits,
    verifies what the first one published, and returns it. A crash at any point leaves either nothing
    visible or the complete artifact.
    """
    address.shelf.mkdir(parents=True, exist_ok=True)
    with hold_lease(address.beside(LOCK_SUFFIX)) as lease:
        if (address.path / MANIFEST).exists():
            artifact = open_artifact(address.path, manifest_type)
            verify_files(artifact.path, artifact.manifest)
            record_current(address, artifact.manifest.identity_key)
            return artifact, False
        workspace = Workspace(address.beside(PARTIAL_SUFFIX), address.beside(SCRATCH_SUFFIX))
        workspace.files.mkdir(exist_ok=True)
        workspace.scratch.mkdir(exist_ok=True)
        with naming_the_place(workspace.files):
            draft = build(workspace)
            manifest = commit(address, manifest_type, service, recipe, draft, lease)
        record_current(address, manifest.identity_key)
        shutil.rmtree(workspace.scratch, ignore_errors=True)  # gc takes what an orphaned task still writes
    return Artifact(address.path, manifest), True


def commit(address: Address, manifest_type: type[M], service: str, recipe: Recipe, draft: Draft, lease: Lease) -> M:
    """Make the partial folder of `address` the published artifact: fsync, hash, manifest, rename."""
    partial = address.beside(PARTIAL_SUFFIX)
    for stale in (partial / MANIFEST, *partial.glob(f".{MANIFEST}.*")):  # of an attempt that was killed right here
        stale.unlink(missing_ok=True)
    manifest = manifest_type(
        schema_id=manifest_type.SCHEMA,
        name=address.name,
        id=address.id,
        identity_key=identity_key(recipe, address.kind),
        created_at=now(),
        producer=producer(service),
        inputs=draft.inputs,
        recipe=recipe.model_dump(mode="json"),
        files=describe_files(partial),
        **{address.kind: draft.payload},
    )
    manifest.write(partial)
    lease.require()
    if address.path.exists():  # a folder that lost its manifest: it does not exist for readers, but keep its bytes
        address.path.rename(address.beside(f".displaced-{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}"))
    partial.rename(address.path)
    sync_folder(address.shelf)
    return manifest


def record_current(address: Address, key: str) -> None:
    """Make `address` the artifact that stages find for recipes with this identity."""
    with hold_lease(address.shelf / f"{CURRENT}{LOCK_SUFFIX}"):
        stored = _load_current(address.shelf)
        if stored is None or stored.get(key) != address.id:
            entries = {**read_current(address.shelf), key: address.id}
            write_durably(address.shelf / CURRENT, json.dumps(entries, indent=1, sort_keys=True).encode())


def find_artifact(
    root: Path, kind: Kind, name: str, recipe: Recipe, manifest_type: type[M], made_by: str
) -> Artifact[M]:
    """Open the newest artifact of this kind and name that was made for the recipe's identity fields.

    Raises `ArtifactError` that says what makes one, `made_by`, when there is none.
    """
    shelf = root / kind / name
    found = read_current(shelf).get(identity_key(recipe, kind))
    if found is not None:
        return open_artifact(shelf / found, manifest_type)
    others = published_ids(shelf)
    seen = f" ({len(others)} there for other recipe settings: {', '.join(others[:4])})" if others else ""
    raise ArtifactError(f"{shelf}: no {kind} for this recipe{seen}. Make it with {made_by}.")


def open_artifact(path: Path, manifest_type: type[M]) -> Artifact[M]:
    """Read a published artifact's manifest; its files are checked by `verify_files`."""
    return Artifact(path, manifest_type.read(path))


def published_ids(shelf: Path) -> list[str]:
    return sorted(path.parent.name for path in shelf.glob(f"*/{MANIFEST}") if PARTIAL_SUFFIX not in path.parent.name)


def read_current(shelf: Path) -> dict[str, str]:
    """The map from identity key to newest id; rebuilt from the manifests when it is lost or torn.

    Raises `ArtifactError` when that needs a manifest that is damaged: passing over it could find an older artifact.
    """
    stored = _load_current(shelf)
    if stored is not None:
        return stored
    manifests = [read_sealed(shelf / found) for found in published_ids(shelf)]
    manifests.sort(key=lambda manifest: manifest["created_at"])
    return {manifest["identity_key"]: manifest["id"] for manifest in manifests}


def _load_current(shelf: Path) -> dict[str, str] | None:
    """What `current.json` says; None when it is lost or torn, or names what is no longer there."""
    try:
        entries = json.loads((shelf / CURRENT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if isinstance(entries, dict) and all((shelf / str(found) / MANIFEST).exists() for found in entries.values()):
        return entries
    return None
