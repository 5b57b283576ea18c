"""The compiler stage, recipe -> compile_cache/1, and its subcommand `plan`.

The stage traces the program's own train step through every phase of a run, compiles the graphs, and publishes the
compile cache once a second process has found nothing left to compile.
"""

from __future__ import annotations

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.files import total_bytes
from services.common.hardware.image_platform import require_backend
from services.common.launch.metrics_export import export_metrics
from services.common.notices import publish_with_notices
from services.common.process.command_line import StageParser
from services.common.process.progress_record import report_published, reporting_progress
from services.common.process.telemetry import configure_logging
from services.common.program.fingerprint import program_facts
from services.common.recipe.derived import describe
from services.common.recipe.schema import fingerprint
from services.compiler.compile import compile_graphs
from services.compiler.graph_plan import plan


def main(argv: list[str]) -> int:
    configure_logging("compiler")
    if argv[:1] == ["plan"]:
        return plan(argv[1:])
    return make_cache(argv)


@reporting_progress("compiler")
def make_cache(argv: list[str]) -> int:
    """Run the stage: make the recipe's compile cache, or find it published."""
    parser = StageParser("compiler", "Compile all graphs of a recipe's program, and publish them as a compile cache.")
    parser.add_launch()
    parser.add_metrics_port()
    parser.epilog = f"{parser.epilog}. `{parser.prog} plan --help` shows how to estimate the time and price on Neuron."
    arguments, recipe = parser.parse(argv)
    if arguments.dry_run:
        print(describe(recipe, None))
        return 0
    require_backend(recipe.parallel.device)
    if not recipe.compile.enabled:
        print("nothing to compile: the recipe has compile.enabled = false")
        return 0
    facts = program_facts(recipe)
    address = compile_cache_address(arguments.root, recipe, fingerprint(facts))
    with export_metrics((), arguments):
        cache, is_new = publish_with_notices(
            address,
            CompileCacheManifest,
            "compiler",
            recipe,
            arguments.recipe,
            lambda workspace: compile_graphs(recipe, facts, workspace, arguments.launch),
        )
    report_published(cache.path, is_new)
    payload = cache.manifest.compile_cache
    print(f"{'published' if is_new else 'already published'}: {cache.path}")
    print(
        f"  {payload.graphs_compiled} graphs, {total_bytes(cache.manifest.files):,} bytes, made in "
        f"{sum(phase.seconds for phase in payload.phases):.0f} s; a second process compiled "
        f"{payload.graphs_missed_by_verification}"
    )
    return 0
