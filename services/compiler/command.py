"""The compiler stage, recipe -> compile_cache/1.

The stage traces the program's own train step through every phase of a run, compiles the graphs, and publishes the
compile cache once a second process has found nothing left to compile.
"""

from __future__ import annotations

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.files import total_bytes
from services.common.hardware.image_platform import require_backend
from services.common.launch.metrics_export import export_metrics
from services.common.notices import publish_with_notices
from services.common.process.command_line import (
    ROOT,
    Context,
    DryRun,
    Launch,
    MetricsHost,
    MetricsPort,
    RecipeCommand,
    RecipePath,
    Root,
    StageGroup,
    make_app,
    read_given,
    run_app,
)
from services.common.process.entry_point import importing
from services.common.process.progress import reporting_progress
from services.common.process.telemetry import configure_logging
from services.common.recipe.derived import describe
from services.common.recipe.schema import fingerprint

app = make_app(StageGroup)


@app.callback()
def prepare() -> None:
    configure_logging("compiler")


def main(argv: list[str]) -> int:
    return run_app(app, argv, "services.compiler")


@app.command("compile", cls=RecipeCommand)
@reporting_progress("compiler")
def make_cache(
    context: Context,
    recipe_path: RecipePath,
    root: Root = ROOT,
    launch: Launch = "",
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    dry_run: DryRun = False,
) -> int:
    """Compile all graphs of a recipe's program, and publish them as a compile cache."""
    recipe = read_given(context, recipe_path, root).recipe
    if dry_run:
        print(describe(recipe, None))
        return 0
    require_backend(recipe.parallel.device)
    if not recipe.compile.enabled:
        print("nothing to compile: the recipe has compile.enabled = false")
        return 0
    with importing():
        from services.common.program.fingerprint import program_facts
        from services.compiler.compile import compile_graphs
    facts = program_facts(recipe)
    address = compile_cache_address(root, recipe, fingerprint(facts))
    with export_metrics((), root, launch, metrics_port, metrics_host):
        cache, is_new = publish_with_notices(
            address,
            CompileCacheManifest,
            "compiler",
            recipe,
            recipe_path,
            lambda workspace: compile_graphs(recipe, facts, workspace, launch),
        )
    payload = cache.manifest.compile_cache
    print(f"{'published' if is_new else 'already published'}: {cache.path}")
    print(
        f"  {payload.graphs_compiled} graphs, {total_bytes(cache.manifest.files):,} bytes, made in "
        f"{sum(phase.seconds for phase in payload.phases):.0f} s; a second process compiled "
        f"{payload.graphs_missed_by_verification}"
    )
    return 0
