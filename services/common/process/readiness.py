"""Is everything there that a stage needs? Asked on a cluster before the stage is given its nodes.

`python -m services.common.process.readiness --stage trainer --recipe FILE --root DIR` prints one JSON object:
`platform` (variant, python, ray), `upstream` (the artifacts that the stage would read) and `problem` (null, or what a
person has to do). It exits with 0, 2 when this image's stage does not take the recipe, 3 when an artifact is missing
or does not fit, 4 when this image or this node is for another device than the recipe's, or 5 when the root cannot be
written. It reads manifests, not the files they list, and needs no torch.
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
    parser = RecipeParser("common.readiness", "Is everything there that a stage needs?")
    parser.add_argument("--stage", choices=STAGES, required=True)
    # The trainer's own options, which change what it reads.
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--allow-cold-compile", action="store_true")
    parser.add_argument("--allow-changed-program", action="store_true")
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
    """Raises `StorageError` unless this user can make folders and files below the root, which is made if absent."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".readiness-", dir=root) as folder:
            (Path(folder) / "file").write_bytes(b"a few bytes, which a full file system refuses")
    except OSError as error:
        if error.errno in STORAGE_ERRNOS:
            raise explain_storage_error(error) from error
        raise


def upstream_of(arguments: Namespace, recipe: Recipe) -> Iterator[Artifact[Any]]:
    """The artifacts that the stage reads. Raises `ArtifactError` at the first that is missing or does not fit.

    The tokenizer reads text, and the compiler the recipe alone.
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
