"""Publishes artifacts exactly once below a root, and finds the artifact that a stage needs.

Layout: `<root>/<kind>/<name>/<id>/`. Work in progress is `<id>.<writer>.partial/` (files to publish) and
`<id>.scratch/` (files that only help to make them), both guarded by the lock `<id>.lock`. The commit is the rename of
the complete partial folder to `<id>/`, which refuses a published artifact. Tasks and workers of a killed command may
outlive its lock, so each writer has a partial folder of its own, and folders are moved aside before they are removed.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from services.common.artifacts.files import describe_files
from services.common.artifacts.lock import hold_lock
from services.common.artifacts.manifest import (
    MANIFEST,
    FileEntry,
    InputLink,
    Manifest,
    describe_producer,
    read_sealed,
    sync_folder,
    write_durably,
)
from services.common.errors import ArtifactError, TryAgain, UnreadableError, adding_path
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

    def partial(self, writer: str) -> Path:
        """Folder that `make_partial` makes for this writer."""
        return self.beside(f".{writer}{PARTIAL_SUFFIX}")


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
    """The folders that a stage fills while it holds the artifact's lock."""

    files: Path
    """Folder of the files to publish: empty at first, and used by this writer alone."""
    scratch: Path
    """Folder that survives a crash, so that work can be resumed. A task of a killed command may still write into it: a
    name in it always stands for the same bytes, a file appears in one step, and a reader checks it."""
    own_scratch: Path
    """Folder below `scratch` for this writer alone. The stage makes it if needed, and the next writer removes it."""


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

    Only the manifest of a published artifact is read: the readers of its files check their bytes. Of two callers at
    once, one builds and the other waits. A crash at any point leaves nothing visible or the complete artifact.
    """
    with hold_lock(address.beside(LOCK_SUFFIX)):
        if (address.path / MANIFEST).exists():
            artifact = require_in_place(open_artifact(address.path, manifest_type))
            record_current(address, artifact.manifest.identity_key)
            return artifact, False
        writer = new_writer()
        files, scratch = make_partial(address, writer), address.beside(SCRATCH_SUFFIX)
        scratch.mkdir(exist_ok=True)
        for path in list(scratch.glob("writer-*")):
            discard(path)
        with adding_path(files):
            draft = build(Workspace(files, scratch, scratch / f"writer-{writer}"))
            manifest = commit(address, manifest_type, service, recipe, draft, files)
        record_current(address, manifest.identity_key)
        if not draft.keeps_scratch:
            discard(scratch)
    return Artifact(address.path, manifest), True


def new_writer() -> str:
    """Return eight hexadecimal digits for the names of folders that only one writer uses."""
    return uuid.uuid4().hex[:8]


def make_partial(address: Address, writer: str) -> Path:
    """Make the empty folder that `commit` publishes and that no other writer uses. The caller holds the lock.

    Unfinished work of earlier writers is removed. Anything else in the artifact's place may be somebody's data, and is
    moved aside, where `gc` removes it.
    """
    for place in (address.path, *address.path.parents[:3]):
        require_mounted(place)
    address.collection.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(address.path):
        address.path.rename(address.beside(f".displaced-{new_writer()}{PARTIAL_SUFFIX}"))
    discard_unfinished(address.collection, re.escape(address.id))
    partial = address.partial(writer)
    partial.mkdir()
    return partial


def discard_unfinished(collection: Path, ids: str = _ID) -> None:
    """Remove unfinished work of artifacts whose id matches `ids`, and what a killed removal has left of them.

    The caller holds the lock of these artifacts.
    """
    for path in list(collection.iterdir()):
        if re.fullmatch(ids + _UNFINISHED, path.name):
            discard(path)


def discard(path: Path) -> None:
    """Remove a file or folder. It disappears in one step, so that nobody uses half of it.

    Of a link only the link is removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"{path.name.split('.')[0]}.removed-{new_writer()}{PARTIAL_SUFFIX}")
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:  # a task of a killed command may still write here to an open file; gc removes the rest
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def commit(address: Address, manifest_type: type[M], service: str, recipe: Recipe, draft: Draft, partial: Path) -> M:
    """Publish the writer's partial folder at `address`: fsync, hash, write the manifest, rename.

    Raises `TryAgain` where another writer has published the artifact.
    """
    manifest = manifest_type(
        schema_id=manifest_type.SCHEMA,
        name=address.name,
        id=address.id,
        identity_key=identity_key(recipe, address.kind),
        created_at=datetime.now(UTC).replace(microsecond=0),
        producer=describe_producer(service),
        inputs=draft.inputs,
        recipe=recipe.model_dump(mode="json"),
        files=describe_files(partial) if draft.files is None else draft.files,
        **{address.kind: draft.payload},
    )
    manifest.write(partial)
    try:
        partial.rename(address.path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
            raise
        raise TryAgain(f"{address.path}: another writer came first. The same command uses what it made.") from error
    sync_folder(address.collection)
    return manifest


def record_current(address: Address, key: str) -> None:
    """Record `address` as the artifact that stages find for recipes with this identity key."""
    with hold_lock(address.collection / f"{CURRENT}{LOCK_SUFFIX}"):
        stored = _load_current(address.collection)
        if stored is None or stored.get(key) != address.id:
            entries = {**read_current(address.collection), key: address.id}
            write_durably(address.collection / CURRENT, json.dumps(entries, indent=1, sort_keys=True).encode())


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
    raise ArtifactError(f"{collection}: no {kind.replace('_', ' ')} for this recipe{seen}. Make it with {made_by}.")


def open_artifact(path: Path, manifest_type: type[M]) -> Artifact[M]:
    """Read the manifest of a published artifact; `verify_files` checks the files."""
    return Artifact(path, manifest_type.read(path))


def require_in_place(artifact: Artifact[M], key: str | None = None) -> Artifact[M]:
    """Return an artifact that was found by its place. Raises `ArtifactError` where its name, id or key is another."""
    path, manifest = artifact.path, artifact.manifest
    if (manifest.name, manifest.id) != (path.parent.name, path.name):
        raise ArtifactError(
            f"{path}: its manifest.json is that of {manifest.name}/{manifest.id}, so the directory was renamed or "
            f"moved. Rename it back, or move it away."
        )
    if key is not None and manifest.identity_key != key:
        raise ArtifactError(
            f"{path.parent / CURRENT}: names {path.name}, which is of another recipe. Remove {CURRENT}; it is "
            f"rebuilt from the manifests."
        )
    return artifact


def published_ids(collection: Path) -> list[str]:
    """Return the names of the published folders.

    Raises `UnreadableError` where one of them, or the collection, may be on a disk that is not mounted.
    """
    for place in (*collection.parents[:2], collection, *collection.glob("*")):
        require_mounted(place)
    return sorted(path.parent.name for path in collection.glob(f"*/{MANIFEST}") if not is_work(path.parent.name))


def require_mounted(path: Path) -> None:
    """Raise `UnreadableError` where `path` is a link that leads nowhere: what it holds may be on another disk."""
    if path.is_symlink() and not path.exists():
        raise UnreadableError(
            f"{path}: a link to {path.readlink()}, which does not exist. Mount its disk, or remove it."
        )


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
    headers = {found: read_sealed(collection / found) for found in published_ids(collection)}
    newest_last = sorted(headers, key=lambda found: str(headers[found].get("created_at")))
    return {str(headers[found].get("identity_key")): found for found in newest_last}


def _load_current(collection: Path) -> dict[str, str] | None:
    """Return the content of `current.json`; None where it is lost or torn, or names an artifact that is gone."""
    try:
        entries = json.loads((collection / CURRENT).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    published = set(published_ids(collection))
    if isinstance(entries, dict) and all(isinstance(each, str) and each in published for each in entries.values()):
        return entries
    return None
