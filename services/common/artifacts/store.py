"""Where artifacts live, how one is published exactly once, and how a stage finds the one it needs.

Layout: `<root>/<kind>/<name>/<id>/`. Work in progress is `<id>.<writer>.partial/` (what will be published) and
`<id>.scratch/` (what only helps to make it), both guarded by the lease `<id>.lock`. The rename of the
complete partial folder to `<id>/` is the commit.

A lease can be lost by a writer that is frozen and wakes up later, so two writers at once are always possible. They
share no partial folder; what one cleans up after the other it first moves aside, so that the other fails instead of
using half of it; and of two commits the second fails, because a rename does not replace a folder with something in it.
A writer that lost, in whatever way, leaves what is published alone and ends with `TryAgain`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
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
    FileEntry,
    Header,
    InputLink,
    Manifest,
    now,
    producer,
    sync_folder,
    write_durably,
)
from services.common.errors import ArtifactError, TryAgain, naming_the_place
from services.common.input.files import parse_json, read_file, unreadable
from services.common.recipe.schema import Kind, Recipe, fingerprint, identity

logger = logging.getLogger(__name__)

CURRENT = "current.json"
PARTIAL_SUFFIX = ".partial"
SCRATCH_SUFFIX = ".scratch"
LOCK_SUFFIX = ".lock"

_ID = r"(?:[0-9a-f]{16}|step-\d{8,})"
_UNFINISHED = r"(?:\.(?:removed-)?[0-9a-f]{8})?\.partial"
_DISPLACED = r"\.displaced-[0-9a-f]{8}\.partial"

M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class Address:
    """The place of one artifact, published or not."""

    root: Path
    kind: Kind
    name: str
    id: str

    @property
    def collection(self) -> Path:
        """The folder of all artifacts of this kind and name."""
        return self.root / self.kind / self.name

    @property
    def path(self) -> Path:
        return self.collection / self.id

    def beside(self, suffix: str) -> Path:
        return self.collection / f"{self.id}{suffix}"


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
    files: tuple[FileEntry, ...] | None = None
    """What was synced and described where it was written; None: `commit` does that."""


@dataclass(frozen=True)
class Workspace:
    """The folders a stage fills while it holds the lease."""

    files: Path
    """What will be published; empty at the beginning, and this writer's own."""
    scratch: Path
    """Survives a crash, so that work can be resumed. A writer that lost its lease may still write into it: two writers
    use the same name in it for the same bytes alone, each puts them there in one step, and what is found is checked."""
    own_scratch: Path
    """Below `scratch`, of this writer alone; made when it is needed, removed by the next writer."""
    lease: Lease


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
    visible or the complete artifact. Raises `TryAgain` when another writer took over.
    """
    address.collection.mkdir(parents=True, exist_ok=True)
    with hold_lease(address.beside(LOCK_SUFFIX)) as held:
        lease = held.lease
        if (address.path / MANIFEST).exists():
            artifact = require_in_place(open_artifact(address.path, manifest_type))
            verify_files(artifact.path, artifact.manifest)
            record_current(address, artifact.manifest.identity_key)
            return artifact, False
        workspace = _begin_workspace(address, lease)
        with naming_the_place(workspace.files):
            draft = build(workspace)
            manifest = commit(address, manifest_type, service, recipe, draft, lease)
        record_current(address, manifest.identity_key)
        discard(workspace.scratch, lease)
    return Artifact(address.path, manifest), True


def _begin_workspace(address: Address, lease: Lease) -> Workspace:
    files, scratch = begin_partial(address, lease), address.beside(SCRATCH_SUFFIX)
    scratch.mkdir(exist_ok=True)
    for path in list(scratch.glob("writer-*")):
        discard(path, lease)
    return Workspace(files, scratch, scratch / f"writer-{lease.writer}", lease)


def begin_partial(address: Address, lease: Lease) -> Path:
    """The empty folder that `commit` publishes, and that no other writer knows.

    What earlier writers of `address` left unfinished is removed. What stands in the artifact's place without being
    one is displaced and not lost: it may be somebody's.
    """
    address.collection.mkdir(parents=True, exist_ok=True)
    displace(address, lease)
    for path in list(address.collection.iterdir()):
        if re.fullmatch(re.escape(address.id) + _UNFINISHED, path.name):
            discard(path, lease)
    partial = partial_of(address, lease)
    partial.mkdir()
    return partial


def displace(address: Address, lease: Lease) -> None:
    """Move what is in the artifact's place out of the way; `gc` removes it."""
    if not os.path.lexists(address.path):
        return
    lease.require()
    aside = address.beside(f".displaced-{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    address.path.rename(aside)
    if not lease.is_held():  # lost in between: it may be what the new holder has published
        aside.rename(address.path)
        raise lease.lost()


def discard(path: Path, lease: Lease) -> None:
    """Remove a file or folder that is the holder's to remove. It vanishes in one step: half of it is never used."""
    aside = path.with_name(f"{path.name.split('.')[0]}.removed-{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    lease.require()
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    try:
        shutil.rmtree(aside)
    except OSError as error:
        # A writer that woke up, or an orphaned task, still writes here by a file that it has open. gc takes the rest.
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ESTALE):
            raise


def partial_of(address: Address, lease: Lease) -> Path:
    """The folder that `begin_partial` makes for this holder."""
    return address.beside(f".{lease.writer}{PARTIAL_SUFFIX}")


def commit(address: Address, manifest_type: type[M], service: str, recipe: Recipe, draft: Draft, lease: Lease) -> M:
    """Make the holder's partial folder of `address` the published artifact: fsync, hash, manifest, rename.

    Raises `TryAgain` when another writer took over, or has published it.
    """
    partial = partial_of(address, lease)
    manifest = manifest_type(
        schema_id=manifest_type.SCHEMA,
        name=address.name,
        id=address.id,
        identity_key=identity_key(recipe, address.kind),
        created_at=now(),
        producer=producer(service),
        inputs=draft.inputs,
        recipe=recipe.model_dump(mode="json"),
        files=describe_files(partial) if draft.files is None else draft.files,
        **{address.kind: draft.payload},
    )
    manifest.write(partial)
    manifest_inode = (partial / MANIFEST).stat().st_ino
    lease.require()
    try:
        partial.rename(address.path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise TryAgain(
                f"{address.path}: another writer, which this one did not see, put a folder there before this one was "
                f"done. It was left as it is; the same command verifies it."
            ) from error
        if not _has_inode(address.path / MANIFEST, manifest_inode):
            raise
        # Done, and the answer was lost: a network file system sends a request again.
    sync_folder(address.collection)
    return manifest


def _has_inode(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def record_current(address: Address, key: str) -> None:
    """Make `address` the artifact that stages find for recipes with this identity."""
    with hold_lease(address.collection / f"{CURRENT}{LOCK_SUFFIX}") as held:
        stored = _load_current(address.collection)
        if stored is None or stored.get(key) != address.id:
            entries = {**read_current(address.collection), key: address.id}
            content = json.dumps(entries, indent=1, sort_keys=True).encode()
            write_durably(address.collection / CURRENT, content, fence=held.lease.require)


def find_artifact(
    root: Path, kind: Kind, name: str, recipe: Recipe, manifest_type: type[M], made_by: str
) -> Artifact[M]:
    """Open the newest artifact of this kind and name that was made for the recipe's identity fields.

    Raises `ArtifactError` that says what makes one, `made_by`, when there is none.
    """
    collection = root / kind / name
    found = read_current(collection).get(identity_key(recipe, kind))
    if found is not None:
        return require_in_place(open_artifact(collection / found, manifest_type), identity_key(recipe, kind))
    others = published_ids(collection)
    seen = f" ({len(others)} there for other recipe settings: {', '.join(others[:4])})" if others else ""
    raise ArtifactError(f"{collection}: no {kind} for this recipe{seen}. Make it with {made_by}.")


def open_artifact(path: Path, manifest_type: type[M]) -> Artifact[M]:
    """Read a published artifact's manifest; its files are checked by `verify_files`."""
    return Artifact(path, manifest_type.read(path))


def require_in_place(artifact: Artifact[M], key: str | None = None) -> Artifact[M]:
    """Raise `ArtifactError` when an artifact that was looked for by its place, and its identity key, is another one."""
    path, manifest = artifact.path, artifact.manifest
    if (manifest.name, manifest.id) != (path.parent.name, path.name):
        raise ArtifactError(
            f"{path}: its manifest is of {manifest.name}/{manifest.id}: it was copied here from there. "
            f"Move the folder away, or back to that place."
        )
    if key is not None and manifest.identity_key != key:
        raise ArtifactError(
            f"{path.parent / CURRENT}: names {path.name} for a recipe that it was not made for. "
            f"Remove {CURRENT}: it is made anew from the manifests."
        )
    return artifact


def published_ids(collection: Path) -> list[str]:
    return sorted(path.parent.name for path in collection.glob(f"*/{MANIFEST}") if not is_work(path.parent.name))


def is_id(name: str) -> bool:
    """Is this a name that a stage gives to an artifact's folder?"""
    return re.fullmatch(_ID, name) is not None


def is_work(name: str) -> bool:
    """Is this a name that a stage gives to work in progress, or to what it moved aside? A person's are other names."""
    return re.fullmatch(rf"{_ID}(?:{_UNFINISHED}|{_DISPLACED}|\.scratch)", name) is not None


def read_current(collection: Path) -> dict[str, str]:
    """The map from identity key to newest id; rebuilt from the manifests when it is lost or torn.

    Raises `ArtifactError` when that needs a manifest that is damaged: passing over it could find an older artifact.
    """
    stored = _load_current(collection)
    if stored is not None:
        return stored
    headers = [(Header.read(collection / found), found) for found in published_ids(collection)]
    headers.sort(key=lambda each: each[0].created_at)
    return {header.identity_key: found for header, found in headers}


def _load_current(collection: Path) -> dict[str, str] | None:
    """What `current.json` says; None when it is lost or torn, or names what is no longer there."""
    path = collection / CURRENT
    try:
        entries = parse_json(read_file(path, collection))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    published = set(published_ids(collection))
    if isinstance(entries, dict) and all(isinstance(each, str) and each in published for each in entries.values()):
        return entries
    return None
