"""Describes a run to its workers: recipe, corpus, compile cache, folders and the command's attempt."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.checkpoint import Ancestor, CheckpointManifest, checkpoint_id
from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.corpus import CorpusManifest, CorpusPayload
from services.common.artifacts.manifest import InputLink
from services.common.artifacts.store import LOCK_SUFFIX, Address, Artifact, artifact_id
from services.common.errors import ArtifactError
from services.common.launch.launcher import INLINE
from services.common.recipe.changes import changed_fields
from services.common.recipe.derived import corpus_weights, tokens_per_step
from services.common.recipe.schema import Recipe

CONTENT_VERSION = 3
ALLOW_COLD_COMPILE = "--allow-cold-compile"
ALLOW_CHANGED_PROGRAM = "--allow-changed-program"
RUN_FILE = "run.json"
"""Name of the file in a run's folder that describes the run."""


@dataclass(frozen=True)
class RunCorpus:
    """A published corpus without its list of files: that of 200,000 shards takes 0.2 GB of memory in every worker."""

    path: Path
    name: str
    link: InputLink
    """The input that checkpoints of the run name."""
    payload: CorpusPayload
    """The geometry and the counts, without the digests of checks."""
    weight: int = 1
    mixed: tuple[RunCorpus, ...] = ()
    """The corpora of a mixture, this one first, by their names in the recipe; none where the run has one corpus."""

    @property
    def parts(self) -> tuple[RunCorpus, ...]:
        return self.mixed or (self,)

    @property
    def links(self) -> tuple[InputLink, ...]:
        return tuple(part.link for part in self.parts)

    @property
    def content_digests(self) -> list[str]:
        """Digests of the files of each corpus, which are computed once: it takes a second for 200,000 files."""
        return [link.content_digest for link in self.links]

    @property
    def id(self) -> str:
        """Id of the corpus, or weights and ids of those of a mixture."""
        return " + ".join(f"{part.weight} x {part.link.id}" for part in self.mixed) or self.link.id

    @property
    def payloads(self) -> dict[str, CorpusPayload]:
        return {part.name: part.payload for part in self.parts}


def describe_corpus(corpus: Artifact[CorpusManifest]) -> RunCorpus:
    """Return what a run needs of a published corpus. Computes the digest of the corpus's files."""
    manifest = corpus.manifest
    return RunCorpus(corpus.path, manifest.name, manifest.link(corpus.path), manifest.corpus.without_digests())


def describe_corpora(recipe: Recipe, corpora: Mapping[str, Artifact[CorpusManifest]]) -> RunCorpus:
    """Return what a run needs of its corpora, which are those of `open_corpora`."""
    weights, described = corpus_weights(recipe), {name: describe_corpus(each) for name, each in corpora.items()}
    parts = tuple(replace(each, name=name, weight=weights[name]) for name, each in described.items())
    return replace(parts[0], mixed=parts) if len(parts) > 1 else parts[0]


class Lineage(NamedTuple):
    """The checkpoints from which a run descends, and the position in the data that follows from them.

    The fields are those of `CheckpointPayload`; a run that is no branch has the defaults.
    """

    ancestors: tuple[Ancestor, ...] = ()
    data_offset_samples: int = 0

    @property
    def parent(self) -> Ancestor | None:
        return self.ancestors[-1] if self.ancestors else None


NO_LINEAGE = Lineage()
"""Lineage of a run that is no branch."""


@dataclass(frozen=True)
class Job:
    """Immutable description of a run and of the command that trains it; every worker gets a copy."""

    recipe: Recipe
    root: Path
    run: str
    """Name of the run: the recipe's name and the hash of everything that decides the weights."""
    corpus: RunCorpus
    cache: Artifact[CompileCacheManifest] | None
    """Compile cache of the program; None if nothing is compiled or the user allows a cold start."""
    program_fingerprint: str
    lineage: Lineage = NO_LINEAGE
    waivers: tuple[str, ...] = ()
    """Flags with which this command continues the run in spite of a mismatch; a checkpoint has earlier ones, too."""
    allows_changed_program: bool = False
    """Whether the command may continue a state that another program made."""
    launch: str = INLINE
    started_at: datetime = field(default_factory=partial(datetime.now, UTC))
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique name of the command, and of the node-local folder that its processes share."""
    workers_started_at: datetime = field(default_factory=partial(datetime.now, UTC))
    """Time of the newest start of the workers."""
    start_number: int = 0
    """Number of the workers' start: 0 for the command's first start, one more after each loss of workers."""

    @property
    def run_folder(self) -> Path:
        return run_folder(self.root, self.run)

    def checkpoint_address(self, step: int) -> Address:
        return Address(self.root, "checkpoint", self.run, checkpoint_id(step))

    @property
    def lock(self) -> Path:
        """Lock of the run, which a command holds while it trains."""
        return self.run_folder.with_name(self.run + LOCK_SUFFIX)

    @property
    def writer(self) -> str:
        """Name of the command in the names of its unfinished checkpoints."""
        return self.attempt[:8]

    @property
    def checkpoint_collection(self) -> Path:
        return checkpoint_collection(self.root, self.run)


def run_folder(root: Path, run: str) -> Path:
    """Return the folder of artifact run/1, the only mutable folder. Losing it loses no training state."""
    return root / "run" / run


def checkpoint_collection(root: Path, run: str) -> Path:
    """Return the folder of a run's checkpoints."""
    return Address(root, "checkpoint", run, "").collection


def rank_log(run_folder: Path, rank: int) -> Path:
    """Return the path of a worker's log, which also gets the stacks of a step that hangs."""
    return run_folder / "logs" / f"rank-{rank:05d}.log"


def run_name(recipe: Recipe, corpus: RunCorpus, parent: Ancestor | None = None) -> str:
    """Return the run's name. Two commands have the same name exactly when the second continues the first."""
    inputs = [*corpus.content_digests, *([parent.content_digest] if parent else [])]
    digest = artifact_id(recipe, "checkpoint", CONTENT_VERSION, inputs)
    return f"{recipe.name}-{digest[:8]}"


def tokens_after(recipe: Recipe, parent: Ancestor | None, step: int, skipped_steps: int) -> int:
    """Return the tokens that a run has trained on after a step, those of its ancestors included.

    `skipped_steps` of all steps updated no weight, and their tokens do not count.
    """
    before, applied = (parent.tokens, parent.step - parent.skipped_steps) if parent else (0, 0)
    return before + (step - skipped_steps - applied) * tokens_per_step(recipe)


def require_own_program(job: Job, checkpoint: Artifact[CheckpointManifest]) -> None:
    """Raise `ArtifactError` if another program made the checkpoint, unless the command allows it: the next steps would
    not be bit for bit the same.
    """
    state, maker = checkpoint.manifest.checkpoint, checkpoint.manifest.producer
    if job.allows_changed_program or state.program_fingerprint == job.program_fingerprint:
        return
    changed = changed_fields(checkpoint.manifest.recipe, job.recipe, "compile_cache")
    what = ", ".join(changed) or "torch, Python, the compiler, the CPU or services/common/program changed"
    raise ArtifactError(
        f"{checkpoint.path}: made by program {state.program_fingerprint[:12]} (trainer {maker.version}, commit "
        f"{maker.git_sha[:12]}, image {maker.image}), but this program is {job.program_fingerprint[:12]}: {what}. The "
        f"next steps may have other bits. Continue with the program that made the checkpoint, or pass "
        f"{ALLOW_CHANGED_PROGRAM}, which the next checkpoints record."
    )


def completed_step(checkpoint: Artifact[CheckpointManifest] | None) -> int:
    return checkpoint.manifest.checkpoint.step if checkpoint else 0
