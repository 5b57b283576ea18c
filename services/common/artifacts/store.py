"""Publishes artifacts exactly once below a root, and finds the artifact that a stage needs.

Layout: `<root>/<kind>/<name>/<id>/`. Work in progress is `<id>.<writer>.partial/` (files to publish) and
`<id>.scratch/` (files that only help to make them), both guarded by the lease `<id>.lock`. The commit is the rename of
the complete partial folder to `<id>/`.

A writer that was frozen can lose its lease and wake up later, so two writers at once are always possible. They share no
partial folder. A writer moves the other's files aside before it removes them, so that the other fails instead of using
half of them. Of two commits the second fails, because a rename does not replace a folder that has files. A writer that
lost leaves the published artifact alone and ends with `TryAgain`.
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

from services.common.artifacts.files import describe_files
from services.common.artifacts.lease import Lease, hold_lease
from services.common.artifacts.manifest import (
    MANIFEST,
    FileEntry,
    Header,
    InputLink,
    Manifest,
    is_dangling,
    now,
    producer,
    require_mounted,
    sync_folder,
    write_durably,
)
from services.common.errors import ArtifactError, TryAgain, naming_the_place
from services.common.input.files import parse_json, read_file, unreadable
from services.common.recipe.schema import Recipe, fingerprint, identity
from services.common.recipe.section import Kind

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
        """Folder of all artifacts of this kind and name."""
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
    """The parts of a manifest that a stage knows once it has filled its workspace."""

    payload: Any
    inputs: tuple[InputLink, ...] = ()
    files: tuple[FileEntry, ...] | None = None
    """Entries of files that the stage has fsynced and hashed itself; None lets `commit` do that."""
    keeps_scratch: bool = False
    """Whether scratch stays after the commit, for later artifacts of the same name. `gc` removes it."""


@dataclass(frozen=True)
class Workspace:
    """The folders that a stage fills while it holds the lease."""

    files: Path
    """Folder of the files to publish: empty at first, and used by this writer alone."""
    scratch: Path
    """Folder that survives a crash, so that work can be resumed. A writer that lost its lease may still write into it.
    So a name in it always stands for the same bytes, a file appears in one step, and a reader checks it."""
    own_scratch: Path
    """Folder below `scratch` for this writer alone. The stage makes it if needed, and the next writer removes it."""
    lease: Lease


def artifact_id(recipe: Recipe, kind: Kind, content_version: int, input_digests: Sequence[str]) -> str:
    """Return the id of the artifact that a stage would make of these recipe fields, input digests and version."""
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
    """Return the artifact at `address`, and whether this call built it.

    Only the manifest of a published artifact is read, whatever the artifact's size: the readers of its files check
    their bytes. Of two callers at once, one builds, and the other waits and returns the published artifact. A crash at
    any point leaves either nothing visible or the complete artifact. Raises `TryAgain` where another writer took over.
    """
    address.collection.mkdir(parents=True, exist_ok=True)
    with hold_lease(address.beside(LOCK_SUFFIX)) as held:
        lease = held.lease
        if (address.path / MANIFEST).exists():
            artifact = require_in_place(open_artifact(address.path, manifest_type))
            record_current(address, artifact.manifest.identity_key)
            return artifact, False
        workspace = _begin_workspace(address, lease)
        with naming_the_place(workspace.files):
            draft = build(workspace)
            manifest = commit(address, manifest_type, service, recipe, draft, lease)
        record_current(address, manifest.identity_key)
        if not draft.keeps_scratch:
            discard(workspace.scratch, lease)
    return Artifact(address.path, manifest), True


def _begin_workspace(address: Address, lease: Lease) -> Workspace:
    files, scratch = begin_partial(address, lease), address.beside(SCRATCH_SUFFIX)
    scratch.mkdir(exist_ok=True)
    for path in list(scratch.glob("writer-*")):
        discard(path, lease)
    return Workspace(files, scratch, scratch / f"writer-{lease.writer}", lease)


def begin_partial(address: Address, lease: Lease) -> Path:
    """Make the empty folder that `commit` publishes and that no other writer uses.

    Unfinished work of earlier writers is removed. Anything else in the artifact's place is moved aside and kept,
    because it may be somebody's data.
    """
    address.collection.mkdir(parents=True, exist_ok=True)
    displace(address, lease)
    discard_unfinished(address.collection, lease, re.escape(address.id))
    partial = partial_of(address, lease)
    partial.mkdir()
    return partial


def discard_unfinished(collection: Path, lease: Lease, ids: str = _ID) -> None:
    """Remove the unfinished work of earlier writers, and what a killed removal has left of an artifact.

    The lease has to guard all artifacts of the collection whose id matches `ids`.
    """
    for path in list(collection.iterdir()):
        if re.fullmatch(ids + _UNFINISHED, path.name):
            discard(path, lease)


def displace(address: Address, lease: Lease) -> None:
    """Move whatever is in the artifact's place aside, where `gc` removes it."""
    if not os.path.lexists(address.path):
        return
    lease.require()
    aside = address.beside(f".displaced-{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    address.path.rename(aside)
    if not lease.is_held():  # lost in between: the new holder may have published it
        aside.rename(address.path)
        raise lease.lost()


def discard(path: Path, lease: Lease) -> None:
    """Remove a file or folder under the lease. It disappears in one step, so that nobody uses half of it.

    Of a link only the link is removed.
    """
    aside = path.with_name(f"{path.name.split('.')[0]}.removed-{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}")
    lease.require()
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    try:
        shutil.rmtree(aside)
    except OSError as error:
        # A writer that woke up, or an orphaned task, still writes here to an open file. gc removes the rest.
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ESTALE):
            raise


def partial_of(address: Address, lease: Lease) -> Path:
    """Return the folder that `begin_partial` makes for this holder."""
    return address.beside(f".{lease.writer}{PARTIAL_SUFFIX}")


def commit(address: Address, manifest_type: type[M], service: str, recipe: Recipe, draft: Draft, lease: Lease) -> M:
    """Publish the holder's partial folder of `address`: fsync, hash, write the manifest, rename.

    Raises `TryAgain` where another writer took over, or has published the artifact.
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
                f"{address.path}: another writer published a folder there first. It was left alone; the same command "
                f"uses it."
            ) from error
        if not _has_inode(address.path / MANIFEST, manifest_inode):
            raise
        # The rename was done and its answer lost: a network file system then sends the request again.
    sync_folder(address.collection)
    return manifest


def _has_inode(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def record_current(address: Address, key: str) -> None:
    """Record `address` as the artifact that stages find for recipes with this identity key."""
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

    Raises `ArtifactError` where there is none; its message says how to make one, which is `made_by`.
    """
    collection = root / kind / name
    found = read_current(collection).get(identity_key(recipe, kind))
    if found is not None:
        return require_in_place(open_artifact(collection / found, manifest_type), identity_key(recipe, kind))
    others = published_ids(collection)
    seen = f" ({len(others)} there for other recipe settings: {', '.join(others[:4])})" if others else ""
    raise ArtifactError(f"{collection}: no {kind} for this recipe{seen}. Make it with {made_by}.")


def open_artifact(path: Path, manifest_type: type[M]) -> Artifact[M]:
    """Read the manifest of a published artifact; `verify_files` checks the files."""
    return Artifact(path, manifest_type.read(path))


def require_in_place(artifact: Artifact[M], key: str | None = None) -> Artifact[M]:
    """Return an artifact that was found by its place. Raises `ArtifactError` where its name, id or key is another."""
    path, manifest = artifact.path, artifact.manifest
    if (manifest.name, manifest.id) != (path.parent.name, path.name):
        raise ArtifactError(
            f"{path}: the manifest has the name and id {manifest.name}/{manifest.id}: the folder is a copy of that "
            f"artifact. Move it away, or back to that place."
        )
    if key is not None and manifest.identity_key != key:
        raise ArtifactError(
            f"{path.parent / CURRENT}: names {path.name} for another recipe than the one it was made for. "
            f"Remove {CURRENT}; it is made anew from the manifests."
        )
    return artifact


def published_ids(collection: Path) -> list[str]:
    """Return the names of the published folders, and of links in their place that lead nowhere: what those lead to may
    be on a disk that is not mounted. Raises `UnreadableError` where the collection is behind such a link.
    """
    for place in (*collection.parents[:2], collection):
        require_mounted(place)
    published = {path.parent.name for path in collection.glob(f"*/{MANIFEST}") if not is_work(path.parent.name)}
    return sorted(published.union(path.name for path in collection.glob("*") if is_id(path.name) and is_dangling(path)))


def is_id(name: str) -> bool:
    """Tell whether a stage gives this name to an artifact's folder."""
    return re.fullmatch(_ID, name) is not None


def is_work(name: str) -> bool:
    """Tell whether a stage gives this name to work in progress, or to a folder that it moved aside."""
    return re.fullmatch(rf"{_ID}(?:{_UNFINISHED}|{_DISPLACED}|\.scratch)", name) is not None


def read_current(collection: Path) -> dict[str, str]:
    """Return the map from identity key to newest id, rebuilt from the manifests where `current.json` is lost or torn.

    Raises `ArtifactError` for a damaged manifest, because without it an older artifact could be taken for the newest.
    """
    stored = _load_current(collection)
    if stored is not None:
        return stored
    headers = [(Header.read(collection / found), found) for found in published_ids(collection)]
    headers.sort(key=lambda each: each[0].created_at)
    return {header.identity_key: found for header, found in headers}


def _load_current(collection: Path) -> dict[str, str] | None:
    """Return the content of `current.json`; None where it is lost or torn, or names an artifact that is gone."""
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
