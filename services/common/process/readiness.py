"""Checks the recipe, image, root and inputs of a stage on a cluster, before the stage gets nodes.

`python -m services.common.process.readiness --stage trainer --recipe FILE --root DIR` prints one JSON object:
`platform` (variant, python, ray), `upstream` (the artifacts that the stage would read) and `problem` (null, or a
message with the next command). It exits with 0, with 2 where this image's stage does not read the recipe, 3 where an
artifact is missing or does not fit, 4 where this image or node is for another device than the recipe's, or 5 where the
root cannot be written. It reads manifests, not the files that they list, and needs no torch. `doctor` checks much more
for the trainer, on the trainer's own nodes: files, compiler, memory and speed.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.store import Artifact, open_artifact
from services.common.artifacts.upstream import find_cache, open_corpus
from services.common.errors import (
    STORAGE_ERRNOS,
    ArtifactError,
    DeviceError,
    MillraceError,
    RecipeError,
    StorageError,
    explain_storage_error,
)
from services.common.hardware.image_platform import WITH_PROGRAM, describe_platform, require_backend
from services.common.process.command_line import RecipeParser
from services.common.process.entry_point import run_program
from services.common.recipe.schema import STAGES, Recipe


def main(argv: list[str]) -> int:
    parser = RecipeParser("common.process.readiness", "Check a stage's recipe, image, root and inputs.")
    parser.add_argument("--stage", choices=STAGES, required=True, help="the stage to check")
    parser.add_argument("--corpus", type=Path, help="the corpus folder that the trainer will get")
    parser.add_argument("--cache", type=Path, help="the compile cache folder that the trainer will get")
    parser.add_argument("--allow-cold-compile", action="store_true", help="let the trainer go without a cache")
    parser.add_argument("--allow-changed-program", action="store_true", help="ignored, as an option of the trainer")
    upstream: list[dict[str, str]] = []
    problem: MillraceError | None = None
    try:
        arguments, recipe = parser.parse(argv)
        if arguments.stage in WITH_PROGRAM:
            require_backend(recipe.parallel.device)
        require_writable(arguments.root)
        for artifact in upstream_of(arguments, recipe):
            upstream.append(_describe(artifact))
    except (RecipeError, ArtifactError, DeviceError, StorageError) as error:
        problem = error
    report = {"platform": _platform(), "upstream": upstream, "problem": str(problem) if problem else None}
    print(json.dumps(report))
    return problem.exit_code if problem else 0


def require_writable(root: Path) -> None:
    """Make the root if absent. Raises `StorageError` unless this user can make folders and files below it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".readiness-", dir=root) as folder:
            (Path(folder) / "file").write_bytes(b"a few bytes, which a full file system refuses")
    except OSError as error:
        if error.errno in STORAGE_ERRNOS:
            raise explain_storage_error(error) from error
        raise


def upstream_of(arguments: Namespace, recipe: Recipe) -> Iterator[Artifact[Any]]:
    """Open the artifacts that a stage reads: the trainer's corpus and cache, and none for the other stages.

    Raises `ArtifactError` for the first one that is missing or does not fit.
    """
    if arguments.stage == "trainer":
        yield open_corpus(recipe, arguments.recipe, arguments.root, arguments.corpus)
        if arguments.cache:
            yield open_artifact(arguments.cache.absolute(), CompileCacheManifest)
        elif recipe.compile.enabled and not arguments.allow_cold_compile:
            yield find_cache(recipe, arguments.recipe, arguments.root)


def _describe(artifact: Artifact[Any]) -> dict[str, str]:
    manifest = artifact.manifest
    return {
        "schema": manifest.schema_id,
        "name": manifest.name,
        "id": manifest.id,
        "content_digest": manifest.content_digest,
    }


def _platform() -> dict[str, str]:
    found = describe_platform()
    return {name: found[name] for name in ("variant", "python", "ray")}


if __name__ == "__main__":
    run_program(main)
