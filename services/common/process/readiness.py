"""Checks the recipe, image, root and inputs of a stage on a cluster, before the stage gets nodes.

`python -m services.common.process.readiness --stage trainer --recipe FILE --root DIR` prints one JSON object:
`platform` (variant, python, ray), `upstream` (the artifacts that the stage would read) and `problem` (null, or a
message with the next command). It exits with 0, or with 2, 3, 4 or 5 as the stage itself would. It reads manifests, not
the files that they list, and needs no torch. The trainer's `doctor` checks much more, on the trainer's own nodes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.store import Artifact, open_artifact
from services.common.artifacts.upstream import find_cache, open_corpora
from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError, StorageError
from services.common.hardware.image_platform import WITH_PROGRAM, describe_platform, require_backend
from services.common.process.command_line import (
    ROOT,
    Context,
    RecipeCommand,
    RecipePath,
    Root,
    make_app,
    read_given,
    run_app,
)
from services.common.process.entry_point import run_program, to_user_error
from services.common.recipe.schema import Stage

MESSAGE_CHARACTERS = 2_000
app = make_app()


def main(argv: list[str]) -> int:
    try:
        return run_app(app, argv, "services.common.process.readiness")
    except RecipeError as error:  # a wrong command line
        return _report([], error)


@app.command(cls=RecipeCommand)
def check(
    context: Context,
    stage: Annotated[Stage, typer.Option(help="the stage to check")],
    recipe_path: RecipePath,
    root: Root = ROOT,
    corpus: Annotated[Path | None, typer.Option(help="the corpus folder that the trainer will get")] = None,
    cache: Annotated[Path | None, typer.Option(help="the compile cache folder that the trainer will get")] = None,
    allow_cold_compile: Annotated[
        bool, typer.Option("--allow-cold-compile", help="let the trainer go without a cache")
    ] = False,
    allow_changed_program: Annotated[
        bool, typer.Option("--allow-changed-program", help="ignored, as an option of the trainer")
    ] = False,
) -> int:
    """Check a stage's recipe, image, root and inputs."""
    upstream: list[Artifact[Any]] = []
    problem: MillraceError | None = None
    try:
        given = read_given(context, recipe_path, root)
        if stage in WITH_PROGRAM:
            require_backend(given.recipe.parallel.device)
        require_writable(root)
        if stage == "trainer":
            upstream.extend(open_corpora(given.recipe, recipe_path, root, corpus).values())
            if cache:
                upstream.append(open_artifact(cache.absolute(), CompileCacheManifest))
            elif given.recipe.compile.enabled and not allow_cold_compile:
                upstream.append(find_cache(given.recipe, recipe_path, root))
    except (RecipeError, ArtifactError, DeviceError, StorageError) as error:
        problem = error
    return _report(upstream, problem)


def _report(upstream: list[Artifact[Any]], problem: MillraceError | None) -> int:
    found = describe_platform()
    platform = {name: found[name] for name in ("variant", "python", "ray")}
    manifests = [each.manifest for each in upstream]
    links = [
        {"schema": each.schema_id, "name": each.name, "id": each.id, "content_digest": each.content_digest}
        for each in manifests
    ]
    # kubelet keeps the last 4 KiB of what a container says at its end.
    said = str(problem)[:MESSAGE_CHARACTERS] if problem else None
    print(json.dumps({"platform": platform, "upstream": links, "problem": said}, ensure_ascii=False))
    return problem.exit_code if problem else 0


def require_writable(root: Path) -> None:
    """Make the root if absent. Raises `StorageError` unless this user can make folders and files below it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".readiness-", dir=root) as folder:
            (Path(folder) / "file").write_bytes(b"a few bytes, which a full file system refuses")
    except OSError as error:
        problem = to_user_error(error)
        if problem is None:
            raise
        raise problem from error


if __name__ == "__main__":
    run_program(main)
