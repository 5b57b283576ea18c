"""What the trainer's command hands to its workers: one value that says what to train from what, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from services.common.artifacts.checkpoint import CheckpointManifest, checkpoint_id
from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.lease import Lease
from services.common.artifacts.store import Address, Artifact, artifact_id, open_artifact
from services.common.artifacts.upstream import find_cache, stage_command
from services.common.errors import ArtifactError
from services.common.input.problem_list import list_problems
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.recipe.changes import changed_fields
from services.common.recipe.schema import Recipe, fingerprint

CONTENT_VERSION = 2
ALLOW_COLD_COMPILE = "--allow-cold-compile"
ALLOW_CHANGED_PROGRAM = "--allow-changed-program"


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    root: Path
    run: str
    """Name of the run: the recipe's name and the hash of everything that decides the weights."""
    corpus: Artifact[CorpusManifest]
    cache: Artifact[CompileCacheManifest] | None
    """None when nothing is compiled, or when the user allows a cold start."""
    program_fingerprint: str
    waivers: tuple[str, ...]
    """Flags that let this run go on where it would have been refused, this command's and earlier ones'."""
    launch: str
    started_at: datetime
    attempt: str
    """Unique per command: names the node-local folder that its processes share."""
    workers_started_at: datetime
    """Begin of the newest start of the workers: `started_at`, or later where workers were lost."""
    lease: Lease | None = None
    start_number: int = 0
    """Of the workers: 0 for the command's first ones, one more at every start after a loss."""

    @property
    def run_folder(self) -> Path:
        return run_folder(self.root, self.run)

    def checkpoint_address(self, step: int) -> Address:
        return Address(self.root, "checkpoint", self.run, checkpoint_id(step))

    @property
    def checkpoint_collection(self) -> Path:
        return self.checkpoint_address(0).collection


def run_folder(root: Path, run: str) -> Path:
    """run/1: the one mutable folder. Losing it loses no training state."""
    return root / "run" / run


def run_name(recipe: Recipe, corpus: Artifact[CorpusManifest]) -> str:
    """Equal for two commands exactly when the second continues the first."""
    digest = artifact_id(recipe, "checkpoint", CONTENT_VERSION, [corpus.manifest.content_digest])
    return f"{recipe.name}-{digest[:8]}"


def open_cache(
    recipe: Recipe, recipe_path: Path, root: Path, explicit: Path | None, allow_cold: bool
) -> tuple[Artifact[CompileCacheManifest] | None, str]:
    """The compile cache of this recipe's program on this machine, and the program's fingerprint.

    Raises `ArtifactError` when there is none, with what differs from the one that is there.
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
        _require_same_program(cache, facts, stage_command("compiler", recipe_path, root))
    except ArtifactError as error:
        if allow_cold:
            return None, ours
        raise ArtifactError(f"{error} Or pass {ALLOW_COLD_COMPILE} to compile at the start of the run.") from error
    return cache, ours


def _require_same_program(cache: Artifact[CompileCacheManifest], facts: dict[str, Any], command: str) -> None:
    theirs, ours = cache.manifest.compile_cache, fingerprint(facts)
    if theirs.program_fingerprint != ours:
        difference = "\n  ".join(
            list_problems(explain_difference(theirs.facts, facts).splitlines(), "facts that differ")
        )
        raise ArtifactError(
            f"{cache.path}: compiled for program {theirs.program_fingerprint[:12]}, this run is {ours[:12]}. "
            f"They differ in\n  {difference}\nMake a cache for this program with `{command}`."
        )


def continue_run(job: Job, checkpoint: Artifact[CheckpointManifest], allow_changed_program: bool) -> Job:
    """The job, with the waivers that `checkpoint` was made under.

    Raises `ArtifactError` when another program made it: the steps to come would not be bit for bit those it would take.
    """
    state, maker = checkpoint.manifest.checkpoint, checkpoint.manifest.producer
    waivers = {*job.waivers, *state.waivers}
    if state.program_fingerprint != job.program_fingerprint:
        if not allow_changed_program:
            changed = changed_fields(checkpoint.manifest.recipe, job.recipe, "compile_cache")
            what = ", ".join(changed) or "torch, Python, the compiler, the CPU or services/common/program changed"
            raise ArtifactError(
                f"{checkpoint.path}: made by program {state.program_fingerprint[:12]} (trainer {maker.version}, commit "
                f"{maker.git_sha[:12]}, image {maker.image}), this one is {job.program_fingerprint[:12]}: {what}, and "
                f"the bits may change with it. "
                f"Continue with what made it, or pass {ALLOW_CHANGED_PROGRAM}, which the next checkpoints record."
            )
        waivers.add(ALLOW_CHANGED_PROGRAM)
    return replace(job, waivers=tuple(sorted(waivers)))


def completed_step(checkpoint: Artifact[CheckpointManifest] | None) -> int:
    return checkpoint.manifest.checkpoint.step if checkpoint else 0
