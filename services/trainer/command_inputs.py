"""Opens what the recipe and the options of a command name: corpus, compile cache, job, run and checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.files import Level
from services.common.artifacts.store import Artifact, open_artifact
from services.common.artifacts.upstream import find_cache, open_corpora, open_corpus, stage_command
from services.common.errors import ArtifactError
from services.common.problem_list import list_problems
from services.common.process.command_line import Given
from services.common.process.entry_point import importing
from services.common.recipe.schema import Recipe, fingerprint
from services.trainer.checkpoints.lookup import choose_checkpoint, verify_state
from services.trainer.job import ALLOW_COLD_COMPILE, Job, RunCorpus, checkpoint_collection, describe_corpora, run_name
from services.trainer.runs.branch import find_lineage
from services.trainer.runs.run import Run


def open_job(given: Given, corpus: RunCorpus, cache_path: Path | None, launch: str, *, allow_cold_compile: bool) -> Job:
    """Open the compile cache of a command, and return its job."""
    cache, program = open_cache(given.recipe, given.recipe_path, given.root, cache_path, allow_cold_compile)
    job = new_job(given.root, given.recipe, corpus, cache, program)
    return replace(job, waivers=(ALLOW_COLD_COMPILE,) if allow_cold_compile else (), launch=launch)


def open_cache(
    recipe: Recipe, recipe_path: Path, root: Path, explicit: Path | None, allow_cold: bool
) -> tuple[Artifact[CompileCacheManifest] | None, str]:
    """Return the compile cache of the recipe's program on this machine, and the program's fingerprint.

    Raises `ArtifactError` if there is none, with the differences from the cache that exists.
    """
    with importing():
        from services.common.program.fingerprint import explain_difference, program_facts
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
        theirs = cache.manifest.compile_cache
        if theirs.program_fingerprint != ours:
            differences = list_problems(explain_difference(theirs.facts, facts).splitlines(), "facts that differ")
            raise ArtifactError(
                f"{cache.path}: compiled for program {theirs.program_fingerprint[:12]}, but this run's program is "
                f"{ours[:12]}. They differ in\n  " + "\n  ".join(differences) + f"\nMake a cache for this program with "
                f"`{stage_command('compiler', recipe_path, root)}`, and pass no other --cache."
            )
    except ArtifactError as error:
        if allow_cold:
            return None, ours
        raise ArtifactError(f"{error} Or pass {ALLOW_COLD_COMPILE} to compile at the start of the run.") from error
    return cache, ours


def new_job(
    root: Path,
    recipe: Recipe,
    corpus: RunCorpus,
    cache: Artifact[CompileCacheManifest] | None,
    program_fingerprint: str,
) -> Job:
    """Return the job of a command that starts or continues the run of the recipe and the corpus now."""
    lineage = find_lineage(root, recipe, corpus)
    run = run_name(recipe, corpus, lineage.parent)
    return Job(recipe, root, run, corpus, cache, program_fingerprint, lineage)


def open_own_corpus(given: Given, corpus_path: Path | None) -> RunCorpus:
    """Open the corpus that `--corpus` names, or else that of the recipe, and the others of its mixture."""
    return describe_corpora(given.recipe, open_corpora(given.recipe, given.recipe_path, given.root, corpus_path))


def open_evaluated(given: Given, run: Run, corpus_path: Path | None) -> RunCorpus:
    """Open the corpus that `--corpus` names, alone also with a mixture, or else what the run trains on."""
    if corpus_path is None:
        return describe_corpora(given.recipe, run.corpora)
    corpus = open_corpus(given.recipe, given.recipe_path, given.root, corpus_path)
    return describe_corpora(given.recipe, {given.recipe.corpus.name: corpus})


def find_own_corpus(given: Given, corpus_path: Path | None) -> RunCorpus | ArtifactError:
    """Open the corpus that the recipe's run trains on, or return why it cannot be opened."""
    try:
        return open_own_corpus(given, corpus_path)
    except ArtifactError as error:
        return error


def open_checkpoint_of(run: Run, step: int | None, level: Level) -> Artifact[CheckpointManifest]:
    """Open and verify the checkpoint of a step of a run, or for None the newest intact one."""
    verify = verify_state(run.recipe, describe_corpora(run.recipe, run.corpora), level)
    return choose_checkpoint(checkpoint_collection(run.root, run.name), step, verify)
