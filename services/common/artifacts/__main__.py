"""Verifies, shows, lists and cleans up artifacts: `python -m services.common.artifacts verify|show|list|gc DIR`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple

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

# The names that stages give to locks, and to temporary files beside locks and beside `current.json`.
_LOCK_OF_RUN = r"[a-z0-9][a-z0-9._-]*-[0-9a-f]{8}\.lock"
_LOCK_IN_COLLECTION = r"(?:[0-9a-f]{16}|step-\d{8,}|current\.json)\.lock"
_CURRENT_DRAFT = r"\.current\.json\.[0-9a-f]+\.tmp"


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
    damaged: list[str] = []
    for path in folders:
        try:
            manifest = read_manifest(path)
            verify_artifact(path, manifest, launcher)
        except ArtifactError as error:
            damaged.append(str(error))
            print(f"{'DAMAGED ' if is_damage(error) else 'UNREADABLE'} {path}", flush=True)
        else:
            size = total_bytes(manifest.files)
            print(f"ok       {path}  {manifest.schema_id}  {len(manifest.files)} files, {size:,} bytes", flush=True)
    if damaged:
        raise ArtifactError("\n".join(list_problems(damaged, "damaged artifacts")))
    return 0


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", callback=_existing, help="the folder of an artifact")],
) -> int:
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
    published: list[tuple[Path, Manifest]] = []
    damaged: list[str] = []
    for path in _find_published(folder):
        try:
            published.append((path, read_manifest(path)))
        except ArtifactError as error:
            damaged.append(str(error))
    for path, manifest in sorted(published, key=lambda each: (each[1].created_at, str(each[0]))):
        size = total_bytes(manifest.files)
        made_by = f"{manifest.producer.service} {manifest.producer.version}"
        print(f"{manifest.created_at:%Y-%m-%d %H:%M}  {manifest.schema_id:<16} {size:>15,}  {made_by:<16} {path}")
    if damaged:
        raise ArtifactError("\n".join(list_problems(damaged, "damaged artifacts")))
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
    published: dict[Path, _Mention] = {}
    unused = _find_unreferenced(root, published) if unreferenced else []
    doomed = [path for path in _find_work(root) + unused if not _is_foreign(path, root)]
    if unreferenced and not yes:
        for path in doomed:
            if not find_holder(_lock_of(path)):
                print(f"would remove {path}")
        print("Nothing was removed. Pass --yes to remove these.")
        return 0
    if unused:  # a stage may have begun to use one meanwhile
        used = set(unused).difference(_find_unreferenced(root, published))
        doomed = [path for path in doomed if path not in used]
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
    """Return the paths that interrupted stages may have left in the collections, those still in use included.

    They are partial, scratch and displaced folders, locks and temporary files. The content of artifacts, and anything
    with a name that no stage gives, is left out; so is a folder without a manifest, which somebody may be copying.
    """
    found = []
    for collection in _collections(root):
        for path in sorted(collection.iterdir()):
            if path.is_symlink() or path.is_dir():
                is_ours = collection != root / RUNS and is_work(path.name)
            else:
                lock = _LOCK_OF_RUN if collection == root / RUNS else _LOCK_IN_COLLECTION
                is_ours = re.fullmatch(rf"{lock}|{_CURRENT_DRAFT}", path.name) is not None
            if is_ours:
                found.append(path)
    return found


def _is_foreign(path: Path, root: Path) -> bool:
    """Tell whether `path` lies behind a link, and print so: another root may own it. A link to work is the root's."""
    links = [each for each in path.parents if each != root and each.is_relative_to(root) and each.is_symlink()]
    if path.is_symlink() and not is_work(path.name):
        links.append(path)
    for link in links[:1]:
        print(f"leaving {path}: {link} leads to {link.readlink()}, which another root may own: remove it there")
    return bool(links)


class _Mention(NamedTuple):
    """The fields of a manifest that tell which artifacts are in use."""

    kind: str
    id: str
    inputs: frozenset[str]
    """Ids of the artifacts that this one was made from."""


def _find_unreferenced(root: Path, published: dict[Path, _Mention]) -> list[Path]:
    """Return the corpora and compile caches that no manifest, run or `current.json` names. Checkpoints are kept.

    A manifest never changes, so this reads those that are not in `published`, and adds their fields there.
    """
    folders = _find_published(root)
    for folder in folders:
        if folder not in published:
            manifest = read_manifest(folder)
            inputs = frozenset(link.id for link in manifest.inputs)
            published[folder] = _Mention(manifest.kind, manifest.id, inputs)
    named = {each for folder in folders for each in published[folder].inputs}
    for collection in _collections(root):
        if (collection / CURRENT).exists():
            named.update(read_current(collection).values())
    for run in (root / RUNS).glob("*/run.json"):
        named.update(_artifacts_of(run))
    collections = set(_collections(root))
    return [
        folder
        for folder in folders
        if published[folder].id not in named and published[folder].kind != "checkpoint"
        # A copy that a person made is that person's.
        if folder.parent in collections and is_id(folder.name)
    ]


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
            f"Run the trainer's command again, which writes the file anew, or move the run's folder away."
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
