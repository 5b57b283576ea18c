"""`python -m services.common.artifacts verify|show|list|gc DIR`: look at artifacts, and clean up after them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import total_bytes, verify_files
from services.common.artifacts.lease import LEASE_SECONDS, age_seconds, hold_lease, is_live
from services.common.artifacts.manifest import MANIFEST, Manifest, read_sealed
from services.common.artifacts.store import CURRENT, LOCK_SUFFIX, PARTIAL_SUFFIX, SCRATCH_SUFFIX, read_current
from services.common.errors import ArtifactError, RecipeError, run_stage

MANIFEST_TYPES: dict[str, type[Manifest]] = {
    each.SCHEMA.split("/")[0]: each for each in (CorpusManifest, CompileCacheManifest, CheckpointManifest)
}
RUNS = "run"


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    commands = {"verify": verify, "show": show, "list": list_artifacts, "gc": collect_garbage}
    return commands[arguments.command](arguments)


def verify(arguments: argparse.Namespace) -> int:
    """Check every artifact at or below DIR; damage is listed and ends with exit code 3."""
    folders = _find_published(arguments.dir)
    if not folders:
        raise ArtifactError(f"{arguments.dir}: no published artifact here (no {MANIFEST} below it).")
    damaged = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            verify_files(folder, manifest)
        except ArtifactError as error:
            damaged.append(str(error))
            print(f"DAMAGED  {folder}", flush=True)
        else:
            size = total_bytes(manifest.files)
            print(f"ok       {folder}  {manifest.schema_id}  {len(manifest.files)} files, {size:,} bytes", flush=True)
    if damaged:
        raise ArtifactError("\n".join(damaged))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the manifest without its file list."""
    manifest = read_manifest(arguments.dir)
    fields = manifest.model_dump(mode="json", by_alias=True, exclude={"files"})
    fields["files"] = f"{len(manifest.files)} files, {total_bytes(manifest.files):,} bytes"
    fields["content_digest"] = manifest.content_digest
    print(json.dumps(fields, indent=2))
    return 0


def list_artifacts(arguments: argparse.Namespace) -> int:
    """One line per published artifact below DIR, oldest first; damaged manifests end with exit code 3."""
    published, damaged = [], []
    for folder in _find_published(arguments.dir):
        try:
            published.append((folder, read_manifest(folder)))
        except ArtifactError as error:
            damaged.append(str(error))
    for folder, manifest in sorted(published, key=lambda each: (each[1].created_at, str(each[0]))):
        size = total_bytes(manifest.files)
        made_by = f"{manifest.producer.service} {manifest.producer.version}"
        print(f"{manifest.created_at:%Y-%m-%d %H:%M}  {manifest.schema_id:<16} {size:>15,}  {made_by:<16} {folder}")
    if damaged:
        raise ArtifactError("\n".join(damaged))
    return 0


def collect_garbage(arguments: argparse.Namespace) -> int:
    """Remove what interrupted work left below the root DIR, and on request artifacts that nothing refers to."""
    doomed = _find_abandoned(arguments.dir)
    if arguments.unreferenced:
        doomed += _find_unreferenced(arguments.dir)
    for path in doomed:
        print(f"{'removing' if arguments.yes or not arguments.unreferenced else 'would remove'} {path}")
    if arguments.unreferenced and not arguments.yes:
        print("Nothing was removed. Pass --yes to remove these.")
        return 0
    for path in doomed:
        _remove(path)
    print(f"{len(doomed)} removed.")
    return 0


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest of any known kind. Raises `ArtifactError` for an unknown one."""
    schema = str(read_sealed(folder).get("schema"))
    manifest_type = MANIFEST_TYPES.get(schema.split("/", maxsplit=1)[0])
    if manifest_type is None:
        known = ", ".join(each.SCHEMA for each in MANIFEST_TYPES.values())
        raise ArtifactError(f"{folder / MANIFEST}: schema {schema!r}, this program reads {known}.")
    return manifest_type.read(folder)


def _find_published(folder: Path) -> list[Path]:
    found = []
    for name, folders, files in os.walk(folder):
        path = Path(name)
        if path.suffix in (PARTIAL_SUFFIX, SCRATCH_SUFFIX):
            folders.clear()
        elif MANIFEST in files:
            found.append(path)
            folders.clear()
    return sorted(found)


def _find_abandoned(root: Path) -> list[Path]:
    """Partial and scratch folders, locks and temporary files whose writer is gone.

    Looks at the shelves alone: what is inside of an artifact is none of our business, also when it ends in `.lock`.
    """
    abandoned = []
    for shelf in _shelves(root):
        for path in sorted(shelf.iterdir()):
            if path.name.startswith("."):
                is_ours = path.suffix == ".tmp" or f"{LOCK_SUFFIX}." in path.name
                if is_ours and age_seconds(path) > LEASE_SECONDS:
                    abandoned.append(path)
            elif path.suffix in (LOCK_SUFFIX, PARTIAL_SUFFIX, SCRATCH_SUFFIX) and not is_live(_lock_of(path)):
                abandoned.append(path)
    return abandoned


def _find_unreferenced(root: Path) -> list[Path]:
    """Corpora and compile caches that no manifest, no run and no `current.json` names. Checkpoints are kept."""
    published = {folder: read_manifest(folder) for folder in _find_published(root)}
    named = {link.id for manifest in published.values() for link in manifest.inputs}
    for shelf in _shelves(root):
        if (shelf / CURRENT).exists():
            named.update(read_current(shelf).values())
    for run in (root / RUNS).glob("*/run.json"):
        named.update(_artifacts_of(run))
    return [
        folder
        for folder, manifest in published.items()
        if manifest.id not in named and manifest.kind != "checkpoint" and not is_live(_lock_of(folder))
    ]


def _artifacts_of(run: Path) -> list[str]:
    try:
        return list(json.loads(run.read_text(encoding="utf-8"))["artifacts"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{run}: damaged: it does not say which artifacts its run uses ({error}). "
            f"Run the trainer's command again, which writes it anew, or move the run's folder away."
        ) from error


def _shelves(root: Path) -> list[Path]:
    """The folders in which stages write and lock. Raises `RecipeError` when `root` is something else."""
    kinds = [root / kind for kind in (*MANIFEST_TYPES, RUNS) if (root / kind).is_dir()]
    if not kinds:
        raise RecipeError(f"{root}: none of {', '.join((*MANIFEST_TYPES, RUNS))} is in it. Pass the --root of a stage.")
    return [
        shelf for kind in kinds for shelf in ([kind] if kind.name == RUNS else sorted(kind.iterdir())) if shelf.is_dir()
    ]


def _lock_of(path: Path) -> Path:
    """The lock that guards something on a shelf. Checkpoints are written under the lock of their run."""
    shelf = path.parent
    if path.suffix == LOCK_SUFFIX:
        return path
    if shelf.parent.name == "checkpoint":
        return shelf.parent.parent / RUNS / f"{shelf.name}{LOCK_SUFFIX}"
    return shelf / (path.name.removesuffix(PARTIAL_SUFFIX).removesuffix(SCRATCH_SUFFIX) + LOCK_SUFFIX)


def _remove(path: Path) -> None:
    if path.name.startswith("."):
        path.unlink(missing_ok=True)
        return
    lock = _lock_of(path)
    lock.parent.mkdir(exist_ok=True)
    with hold_lease(lock):  # takes over from the dead writer; one that came back just now is waited for
        if path == lock or path.name in read_current(path.parent).values():
            return
        if path.is_dir():
            (path / MANIFEST).unlink(missing_ok=True)  # first: a half-removed folder must not look published
            shutil.rmtree(path)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.common.artifacts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|show|list|gc")
    for name, function in (("verify", verify), ("show", show), ("list", list_artifacts), ("gc", collect_garbage)):
        command = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        command.add_argument("dir", type=Path, nargs="?" if name != "show" else None, default=Path("fsx"))
        if name == "gc":
            command.add_argument("--unreferenced", action="store_true", help="also what nothing refers to")
            command.add_argument("--yes", action="store_true", help="do remove the unreferenced artifacts")
    arguments = parser.parse_args(argv)
    if not arguments.dir.is_dir():
        raise RecipeError(f"{arguments.dir}: no such folder.")
    return arguments


if __name__ == "__main__":
    run_stage(main)
