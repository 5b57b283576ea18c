"""Verifies, shows, lists and cleans up artifacts: `python -m services.common.artifacts verify|show|list|gc DIR`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from services.common.artifacts.checkpoint import CheckpointManifest, step_of
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import total_bytes
from services.common.artifacts.lock import LockTaken, find_holder, hold_lock
from services.common.artifacts.manifest import MANIFEST, Manifest, read_sealed
from services.common.artifacts.store import CURRENT, LOCK_SUFFIX, discard, is_id, is_work, read_current, require_mounted
from services.common.artifacts.verification import verify_artifact
from services.common.errors import ArtifactError, RecipeError, is_damage, unreadable
from services.common.launch.launcher import INLINE, LAUNCHERS, choose_launcher
from services.common.problem_list import list_problems
from services.common.process.command_line import ROOT, make_app, one_of, run_app
from services.common.process.entry_point import run_program

MANIFEST_TYPES: dict[str, type[Manifest]] = {
    each.SCHEMA.split("/")[0]: each for each in (CorpusManifest, CompileCacheManifest, CheckpointManifest)
}
RUNS = "run"
_RUN_LOCK = re.compile(r"[a-z0-9][a-z0-9._-]*-[0-9a-f]{8}\.lock")
_LOCK_OR_DRAFT = re.compile(r"(?:[0-9a-f]{16}|step-\d{8,}|current\.json)\.lock|\.current\.json\.[0-9a-f]+\.tmp")


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise RecipeError(f"{folder}: no such folder. Pass the --root of a stage, or a folder in it.")
    return folder


Folder = Annotated[Path, typer.Argument(metavar="DIR", callback=_existing, help="a root, or a folder below it")]
app = make_app()


def main(argv: list[str]) -> int:
    return run_app(app, argv, "services.common.artifacts")


@app.command()
def verify(
    folder: Folder = ROOT,
    launch: Annotated[
        str,
        typer.Option(
            metavar="inline|ray",
            callback=one_of(LAUNCHERS),
            help="inline: read on this machine; ray: the nodes of the Ray cluster of RAY_ADDRESS share the files",
        ),
    ] = INLINE,
) -> int:
    """Check every artifact at or below DIR; exit with 3 for a damaged one."""
    folders, launcher = _find_published(folder), choose_launcher(launch)
    if not folders:
        raise ArtifactError(f"{folder}: no published artifact here (no {MANIFEST} below it).")

    def check(path: Path) -> None:
        try:
            manifest = read_manifest(path)
            verify_artifact(path, manifest, launcher)
        except ArtifactError as error:
            print(f"{'DAMAGED ' if is_damage(error) else 'UNREADABLE'} {path}", flush=True)
            raise
        size = total_bytes(manifest.files)
        print(f"ok       {path}  {manifest.schema_id}  {len(manifest.files)} files, {size:,} bytes", flush=True)

    _for_each(folders, check)
    return 0


@app.command()
def show(folder: Folder) -> int:
    """Print an artifact's manifest without its file list."""
    manifest = read_manifest(folder)
    fields = manifest.model_dump(mode="json", by_alias=True, exclude={"files"})
    fields["files"] = f"{len(manifest.files)} files, {total_bytes(manifest.files):,} bytes"
    fields["content_digest"] = manifest.content_digest
    print(json.dumps(fields, indent=2))
    return 0


@app.command("list")
def list_artifacts(folder: Folder = ROOT) -> int:
    """Print a line for each published artifact below DIR, oldest first; exit with 3 for a damaged manifest."""
    lines: list[str] = []

    def describe(path: Path) -> None:
        found = read_manifest(path)
        size, made_by = total_bytes(found.files), f"{found.producer.service} {found.producer.version}"
        lines.append(f"{found.created_at:%Y-%m-%d %H:%M}  {found.schema_id:<16} {size:>15,}  {made_by:<16} {path}")

    try:
        _for_each(_find_published(folder), describe)
    finally:
        print(*sorted(lines), sep="\n", end="\n" if lines else "")
    return 0


@app.command("gc")
def collect_garbage(
    root: Folder = ROOT,
    unreferenced: Annotated[
        bool,
        typer.Option(
            "--unreferenced",
            help="also remove corpora and caches that no manifest, run or current.json names; lists them first",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="remove them, instead of listing them")] = False,
) -> int:
    """Remove the leftovers of interrupted work below the root DIR, and on request unreferenced artifacts."""
    unused = _find_unreferenced(root) if unreferenced else []
    doomed = [path for path in _find_work(root) + unused if not _is_foreign(path, root)]
    if unreferenced and not yes:
        for path in doomed:
            if not find_holder(_lock_of(path)):
                print(f"would remove {path}")
        print("Nothing was removed. Pass --yes to remove these.")
        return 0
    removed = [_remove(path, is_published=path in unused) for path in doomed]
    print(f"{sum(removed)} removed.")
    return 0


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest of any known kind, once. Raises `ArtifactError` for an unknown kind."""
    raw = read_sealed(folder)
    schema = str(raw.get("schema"))
    manifest_type = MANIFEST_TYPES.get(schema.split("/", maxsplit=1)[0])
    if manifest_type is None:
        known = ", ".join(each.SCHEMA for each in MANIFEST_TYPES.values())
        raise ArtifactError(f"{folder / MANIFEST}: schema {schema!r}, this program reads {known}.")
    return manifest_type.parse(raw, folder / MANIFEST)


def _for_each(folders: list[Path], work: Callable[[Path], None]) -> None:
    """Call `work` for all folders, and raise its `ArtifactError`s together at the end."""
    damaged: list[str] = []
    for folder in folders:
        try:
            work(folder)
        except ArtifactError as error:
            damaged.append(str(error))
    if damaged:
        raise ArtifactError("\n".join(list_problems(damaged, "damaged artifacts")))


def _find_published(folder: Path) -> list[Path]:
    """Return the published folders, behind links too. Raises `UnreadableError` for a link that leads nowhere.

    Only a folder's own name marks work in progress: a recipe may be `x.partial`.
    """
    found = []
    for name, folders, files in os.walk(folder, onerror=_raise_unreadable, followlinks=True):
        path = Path(name)
        if MANIFEST in files:
            folders.clear()
            if not is_work(path.name):
                found.append(path)
        else:
            for each in files:
                require_mounted(path / each)
    return sorted(found, key=lambda path: (path.parent, step_of(path.name) or 0, path.name))


def _raise_unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # removed just now
        raise unreadable(Path(error.filename), error) from error


def _find_work(root: Path) -> list[Path]:
    """Return the partial and scratch folders, locks and drafts in the collections, those still in use included.

    The content of artifacts, and anything with a name that no stage gives, is left out; so is a folder without a
    manifest, which somebody may be copying.
    """
    return [
        path
        for collection in _collections(root)
        for path in sorted(collection.iterdir())
        if (
            _RUN_LOCK.fullmatch(path.name)
            if collection == root / RUNS
            else is_work(path.name) or _LOCK_OR_DRAFT.fullmatch(path.name)
        )
    ]


def _is_foreign(path: Path, root: Path) -> bool:
    """Tell whether `path` lies behind a link out of the root, and print so: another root may own it."""
    real = path.parent.resolve()
    if real.is_relative_to(root.resolve()):
        return False
    print(f"leaving {path}: it is in {real}, which another root may own: remove it there")
    return True


def _find_unreferenced(root: Path) -> list[Path]:
    """Return the corpora and compile caches that no manifest, run or `current.json` names. Checkpoints are kept."""
    folders, collections = _find_published(root), _collections(root)
    named: set[str] = set()
    candidates: dict[Path, str] = {}
    for folder in folders:
        manifest = read_manifest(folder)
        named.update(link.id for link in manifest.inputs)
        # A copy that a person made is that person's.
        if manifest.kind != "checkpoint" and folder.parent in collections and is_id(folder.name):
            candidates[folder] = manifest.id
    for collection in collections:
        if (collection / CURRENT).exists():
            named.update(read_current(collection).values())
    for run in (root / RUNS).glob("*/run.json"):
        named.update(_artifacts_of(run))
    return [folder for folder, identifier in candidates.items() if identifier not in named]


def _artifacts_of(run: Path) -> list[str]:
    try:
        ids = list(json.loads(run.read_bytes())["artifacts"].values())
        if not all(isinstance(each, str) for each in ids):
            raise TypeError(f"{ids} are no ids")
        return ids
    except OSError as error:
        raise unreadable(run, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{run}: damaged: it does not name the artifacts of its run ({error}). "
            f"Rerun the trainer's command, which rewrites the file, or move the run's folder away."
        ) from error


def _collections(root: Path) -> list[Path]:
    """Return the folders in which stages write and lock. Raises `RecipeError` where `root` is not a stage's root."""
    kinds = [root / kind for kind in (*MANIFEST_TYPES, RUNS) if (root / kind).is_dir()]
    if not kinds:
        raise RecipeError(f"{root}: it has none of {', '.join((*MANIFEST_TYPES, RUNS))}. Pass the --root of a stage.")
    return [
        collection
        for kind in kinds
        for collection in ([kind] if kind.name == RUNS else sorted(kind.iterdir()))
        if collection.is_dir()
    ]


def _lock_of(path: Path) -> Path:
    """Return the lock file that tells whether a writer still uses `path`.

    Checkpoints are written under the lock of their run.
    """
    collection = path.parent
    if path.name.startswith("."):
        return collection / f"{CURRENT}{LOCK_SUFFIX}"
    if path.suffix == LOCK_SUFFIX:
        return path
    if collection.parent.name == "checkpoint":
        return collection.parent.parent / RUNS / f"{collection.name}{LOCK_SUFFIX}"
    return collection / f"{path.name.split('.')[0]}{LOCK_SUFFIX}"


def _remove(path: Path, is_published: bool) -> bool:
    """Remove `path` under its lock and return True; leave it where a stage uses it or has published it meanwhile."""
    lock = _lock_of(path)
    try:
        with hold_lock(lock, waits=False):
            is_used = is_published and path.name in read_current(path.parent).values()
            if is_used or is_published != (not is_work(path.name) and (path / MANIFEST).exists()):
                print(f"leaving {path}: it was published or used just now")
                return False
            print(f"removing {path}")
            if path != lock:
                discard(path)
    except LockTaken as error:
        print(f"leaving {path}: {error}")
        return False
    return True


if __name__ == "__main__":
    run_program(main)
