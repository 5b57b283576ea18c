"""Opens what the recipe and the options of a command name: corpus, compile cache, job and run."""

from __future__ import annotations

import uuid
from argparse import Namespace
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.store import Artifact, open_artifact
from services.common.artifacts.upstream import find_cache, open_corpus, stage_command
from services.common.errors import ArtifactError, RecipeError
from services.common.input.problem_list import list_problems
from services.common.launch.launcher import INLINE
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.branch import find_lineage, name_run
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.corpus import RunCorpus, describe_corpus
from services.trainer.job import ALLOW_COLD_COMPILE, Job, run_name
from services.trainer.run import Run, open_run


def open_job(arguments: Namespace, recipe: Recipe) -> Job:
    """Open the corpus and the compile cache of a command, and return its job."""
    cache, program = open_cache(recipe, arguments.recipe, arguments.root, arguments.cache, arguments.allow_cold_compile)
    waivers = (ALLOW_COLD_COMPILE,) if arguments.allow_cold_compile else ()
    job = new_job(arguments.root, recipe, open_own_corpus(arguments, recipe), cache, program)
    return replace(job, waivers=waivers, launch=arguments.launch)


def open_cache(
    recipe: Recipe, recipe_path: Path, root: Path, explicit: Path | None, allow_cold: bool
) -> tuple[Artifact[CompileCacheManifest] | None, str]:
    """Return the compile cache of the recipe's program on this machine, and the program's fingerprint.

    Raises `ArtifactError` if there is none, with the differences from the cache that exists.
    """
    facts = program_facts(recipe)
    ours = fingerprint(facts)
    if not recipe.compile.enabled:
        return None, ours
    exact = compile_cache_address(root, recipe, ours)
    try:
        if explicit:
            cache = open_artifact(explicit.absolute(), CompileCacheManifest)
        elif exact.path.exists():
            cache = open_artifact(exact.path, CompileCacheManifest)
        else:
            cache = find_cache(recipe, recipe_path, root)
        omit = "Omit --cache, and make" if explicit else "Make"
        made_by = f"{omit} a cache for this program with `{stage_command('compiler', recipe_path, root)}`."
        _require_same_program(cache, facts, made_by)
    except ArtifactError as error:
        if allow_cold:
            return None, ours
        raise ArtifactError(f"{error} Or pass {ALLOW_COLD_COMPILE} to compile at the start of the run.") from error
    return cache, ours


def _require_same_program(cache: Artifact[CompileCacheManifest], facts: dict[str, Any], advice: str) -> None:
    theirs, ours = cache.manifest.compile_cache, fingerprint(facts)
    if theirs.program_fingerprint != ours:
        difference = "\n  ".join(
            list_problems(explain_difference(theirs.facts, facts).splitlines(), "facts that differ")
        )
        raise ArtifactError(
            f"{cache.path}: compiled for program {theirs.program_fingerprint[:12]}, but this run's program is "
            f"{ours[:12]}. They differ in\n  {difference}\n{advice}"
        )


def new_job(
    root: Path,
    recipe: Recipe,
    corpus: RunCorpus,
    cache: Artifact[CompileCacheManifest] | None,
    program_fingerprint: str,
) -> Job:
    """Return the job of a command of this moment, which begins or continues the run of the recipe and the corpus."""
    now, lineage = datetime.now(UTC), find_lineage(root, recipe, corpus)
    return Job(
        recipe=recipe,
        root=root,
        run=run_name(recipe, corpus, lineage.parent),
        corpus=corpus,
        cache=cache,
        program_fingerprint=program_fingerprint,
        waivers=(),
        launch=INLINE,
        started_at=now,
        attempt=uuid.uuid4().hex,
        workers_started_at=now,
        lineage=lineage,
    )


def open_own_corpus(arguments: Namespace, recipe: Recipe) -> RunCorpus:
    """Open the corpus that `--corpus` names, or else that of the recipe."""
    return describe_corpus(open_corpus(recipe, arguments.recipe, arguments.root, arguments.corpus))


def find_published_corpus(arguments: Namespace, recipe: Recipe) -> RunCorpus | None:
    """Do the same as `open_own_corpus`; return None where there is no such corpus."""
    try:
        return open_own_corpus(arguments, recipe)
    except ArtifactError:
        return None


def open_own_run(arguments: Namespace, recipe: Recipe) -> Run:
    """Open the run of the recipe and its corpus, with its newest intact checkpoint."""
    return open_run(arguments.root, name_own_run(arguments, recipe))


def name_own_run(arguments: Namespace, recipe: Recipe) -> str:
    """Return the name of the run of the recipe and its corpus."""
    corpus = open_own_corpus(arguments, recipe)
    return name_run(arguments.root, recipe, corpus)


def read_nxd_layout(arguments: Namespace) -> NxdLayout | None:
    """Return the layout of an NxD checkpoint that the options of `export` ask for; None for a Hugging Face folder."""
    size, copies = arguments.tensor_parallel_size, arguments.kv_size_multiplier
    if arguments.format == "nxd":
        if size is None or size < 1 or (copies is not None and copies < 1):
            raise RecipeError(
                "--format nxd: needs --tensor-parallel-size of at least 1, and no --kv-size-multiplier below 1. For "
                "example: --tensor-parallel-size 8"
            )
        return NxdLayout(size, copies or 1, arguments.qkv_linear, arguments.fuse_qkv)
    if size is not None or copies is not None or arguments.qkv_linear or arguments.fuse_qkv:
        raise RecipeError(
            "--tensor-parallel-size, --kv-size-multiplier, --qkv-linear and --fuse-qkv apply to --format nxd only: add "
            "--format nxd, or omit them."
        )
    return None
