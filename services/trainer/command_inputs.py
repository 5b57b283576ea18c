"""Opens what the recipe and the options of a command name: corpus, compile cache, job and run."""

from __future__ import annotations

import uuid
from argparse import Namespace
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.store import Artifact
from services.common.artifacts.upstream import open_corpus
from services.common.errors import ArtifactError, RecipeError
from services.common.launch.launcher import INLINE
from services.common.recipe.schema import Recipe
from services.trainer.branch import find_lineage, name_run
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.corpus import RunCorpus, describe_corpus
from services.trainer.job import ALLOW_COLD_COMPILE, Job, open_cache, run_name
from services.trainer.run import Run, open_run


def open_job(arguments: Namespace, recipe: Recipe) -> Job:
    """Open the corpus and the compile cache of a command, and return its job."""
    cache, program = open_cache(recipe, arguments.recipe, arguments.root, arguments.cache, arguments.allow_cold_compile)
    waivers = (ALLOW_COLD_COMPILE,) if arguments.allow_cold_compile else ()
    job = new_job(arguments.root, recipe, open_own_corpus(arguments, recipe), cache, program)
    return replace(job, waivers=waivers, launch=arguments.launch)


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
