"""`python -m services.common.artifacts verify|show|list|gc DIR`: look at artifacts, and clean up after them."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import total_bytes, verify_files
from services.common.artifacts.lease import is_live
from services.common.artifacts.manifest import MANIFEST, Manifest
from services.common.artifacts.store import CURRENT, LOCK_SUFFIX, PARTIAL_SUFFIX, SCRATCH_SUFFIX
from services.common.errors import ArtifactError, RecipeError, run_stage

MANIFEST_TYPES: dict[str, type[Manifest]] = {
    each.SCHEMA.split("/")[0]: each for each in (CorpusManifest, CompileCacheManifest, CheckpointManifest)
}


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
    """One line per published artifact below DIR, oldest first."""
    published = [(folder, read_manifest(folder)) for folder in _find_published(arguments.dir)]
    for folder, manifest in sorted(published, key=lambda each: (each[1].created_at, str(each[0]))):
        size = total_bytes(manifest.files)
        made_by = f"{manifest.producer.service} {manifest.producer.version}"
        print(f"{manifest.created_at:%Y-%m-%d %H:%M}  {manifest.schema_id:<16} {size:>15,}  {made_by:<16} {folder}")
    return 0


def collect_garbage(arguments: argparse.Namespace) -> int:
    """Remove what interrupted work left behind, and on request published artifacts that nothing refers to."""
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
    try:
        schema = str(json.loads((folder / MANIFEST).read_bytes()).get("schema"))
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        schema = ""  # Manifest.read explains what is wrong
    return MANIFEST_TYPES.get(schema.split("/")[0], CorpusManifest).read(folder)


def _find_published(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob(MANIFEST) if PARTIAL_SUFFIX not in path.parent.name)


def _find_abandoned(root: Path) -> list[Path]:
    """Partial and scratch folders, locks and temporary files whose writer is gone."""
    abandoned = []
    for lock in root.rglob(f"*{LOCK_SUFFIX}"):
        if not is_live(lock):
            abandoned.append(lock)
    for suffix in (PARTIAL_SUFFIX, SCRATCH_SUFFIX):
        for folder in root.rglob(f"*{suffix}"):
            if not is_live(folder.with_name(folder.name.removesuffix(suffix) + LOCK_SUFFIX)):
                abandoned.append(folder)
    return sorted(abandoned)


def _find_unreferenced(root: Path) -> list[Path]:
    """Corpora and compile caches that no manifest, no run and no `current.json` names. Checkpoints are kept."""
    published = {folder: read_manifest(folder) for folder in _find_published(root)}
    named = {link.id for manifest in published.values() for link in manifest.inputs}
    for current in root.rglob(CURRENT):
        named.update(json.loads(current.read_text(encoding="utf-8")).values())
    for run in root.rglob("run.json"):
        named.update(json.loads(run.read_text(encoding="utf-8"))["artifacts"].values())
    return [
        folder for folder, manifest in published.items() if manifest.id not in named and manifest.kind != "checkpoint"
    ]


def _remove(path: Path) -> None:
    if path.is_dir():
        (path / MANIFEST).unlink(missing_ok=True)  # first: a half-removed folder must not look published
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
