"""Finds a run's checkpoints, opens them, and verifies that they belong to the run."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from services.common.artifacts.checkpoint import CheckpointManifest, ShardOrigin, checkpoint_id, shard_name
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import Level, verify_files
from services.common.artifacts.manifest import MANIFEST, FileEntry
from services.common.artifacts.store import Address, Artifact, identity_key, open_artifact, require_in_place
from services.common.errors import ArtifactError, UnreadableError, shell_command
from services.common.problem_list import list_names, list_problems
from services.common.program.mesh import Mesh
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.job import RunCorpus

logger = logging.getLogger(__name__)

Verify = Callable[[Artifact[CheckpointManifest]], None]
"""Function that raises `ArtifactError` for a damaged checkpoint."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint as rank 0 describes it to the workers: it does not grow with the number of shards.

    A worker that needs more than its own shard reads the manifest again.
    """

    path: Path
    header: CheckpointManifest
    """The manifest without its list of files and the origins of the shards."""
    content_digest: str

    @classmethod
    def of(cls, checkpoint: Artifact[CheckpointManifest]) -> Self:
        manifest = checkpoint.manifest
        state = manifest.checkpoint.model_copy(update={"shards": {}})
        header = manifest.model_copy(update={"files": (), "checkpoint": state})
        return cls(checkpoint.path, header, manifest.content_digest)

    def origin_of(self, rank: int) -> ShardOrigin:
        """Return the origin that the header of a rank's shard has to name, and for rank 0 also that of the index."""
        return self.header.checkpoint.origin(self.header.name, rank)

    def read_manifest(self) -> CheckpointManifest:
        """Read the manifest again. Raises `ArtifactError` where it is not the one that rank 0 has read."""
        checkpoint = open_artifact(self.path, CheckpointManifest)
        if FoundCheckpoint.of(checkpoint) != self:
            raise ArtifactError(
                f"{self.path / MANIFEST}: differs from the one that rank 0 has read. Mount the same volume on all "
                f"nodes, and start the command again."
            )
        return checkpoint.manifest


class OwnShard(NamedTuple):
    """The shard of a checkpoint that the rank of a worker wrote."""

    rank: int
    entry: FileEntry


def describe_checkpoint(
    checkpoint: Artifact[CheckpointManifest], recipe: Recipe, mesh: Mesh
) -> tuple[FoundCheckpoint, list[OwnShard | None]]:
    """Return what all workers are told of a checkpoint, and each rank's own shard; None if another layout wrote it."""
    state, entries = checkpoint.manifest.checkpoint, {entry.path: entry for entry in checkpoint.manifest.files}
    layout = (mesh.data_parallel_size, mesh.tensor_parallel_size, recipe.parallel.zero_stage > 0)
    is_own = (state.data_parallel_size, state.tensor_parallel_size, state.zero_stage > 0) == layout
    own_shards = [
        OwnShard(rank, entries[name]) if is_own and name in entries and state.shards[name].rank == rank else None
        for rank, name in enumerate(map(shard_name, range(mesh.world_size)))
    ]
    return FoundCheckpoint.of(checkpoint), own_shards


def verify_checkpoint(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Verify the bytes of all files. Raises `ArtifactError`, which names the damaged files."""
    verify_files(checkpoint.path, checkpoint.manifest)


def verify_sizes(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Verify that all files exist with their sizes, which one process can do for a checkpoint of any size."""
    verify_files(checkpoint.path, checkpoint.manifest, level="size")


def verify_state(recipe: Recipe, corpus: RunCorpus, level: Level = "full") -> Verify:
    """Return a function that verifies a checkpoint's bytes or sizes, and that it is of the recipe's run."""

    def verify(checkpoint: Artifact[CheckpointManifest]) -> None:
        verify_files(checkpoint.path, checkpoint.manifest, level=level)
        require_of_run(checkpoint, recipe, corpus)

    return verify


def require_of_run(checkpoint: Artifact[CheckpointManifest], recipe: Recipe, corpus: RunCorpus) -> None:
    """Raise `ArtifactError` unless the checkpoint was made from the recipe and the corpus of this run."""
    manifest = checkpoint.manifest
    expected = (identity_key(recipe, "checkpoint"), corpus.content_digests)
    found = (manifest.identity_key, [link.content_digest for link in manifest.inputs])
    if found != expected:
        raise ArtifactError(
            f"{checkpoint.path}: is of another run: its recipe and corpus are {found}, expected {expected}. Move its "
            f"folder away: the run continues from the one before."
        )


def newest_checkpoint(collection: Path, verify: Verify = verify_checkpoint) -> Artifact[CheckpointManifest] | None:
    """Return the newest intact checkpoint; damaged ones are reported and skipped.

    Raises `UnreadableError` for a checkpoint that this user may not read, because it may be intact, and `ArtifactError`
    if all are damaged: nobody wants such a run to start again from step 0.
    """
    damages = []
    for step in reversed(checkpoint_steps(collection)):
        try:
            return open_checkpoint(collection, step, verify)
        except UnreadableError:
            raise
        except ArtifactError as error:
            logger.warning("skipping a damaged checkpoint: %s", error)
            damages.append(f"{checkpoint_id(step)}: {error}")
    if damages:
        raise all_damaged(collection, damages)
    return None


def all_damaged(collection: Path, damages: list[str]) -> ArtifactError:
    listed = "\n  ".join(list_problems(damages, "damaged checkpoints"))
    return ArtifactError(
        f"{collection}: all {len(damages)} checkpoints are damaged:\n  {listed}\nRestore one from a copy, or move "
        f"{collection} away to start this run from step 0."
    )


def no_checkpoint_yet(collection: Path) -> ArtifactError:
    return ArtifactError(
        f"{collection}: the run has no checkpoint. Train it first, or name another run: "
        f"`{run_command(collection.parents[1], 'runs')}` lists them."
    )


def run_command(root: Path, name: str, *words: str) -> str:
    """Return a command about the runs of a root, quoted for a shell: `millrace report RUN --root ROOT`."""
    return f"{shell_command('services.trainer', name)} {shlex.join([*words, '--root', str(root)])}"


def open_checkpoint(collection: Path, step: int, verify: Verify = verify_checkpoint) -> Artifact[CheckpointManifest]:
    """Open and verify the checkpoint of a step. Raises `ArtifactError` if it is damaged or another step's."""
    folder = collection / checkpoint_id(step)
    checkpoint = require_in_place(open_artifact(folder, CheckpointManifest))
    if checkpoint.manifest.checkpoint.step != step:
        raise ArtifactError(
            f"{folder}: its manifest describes the state after step {checkpoint.manifest.checkpoint.step:,}."
        )
    verify(checkpoint)
    return checkpoint


def choose_checkpoint(
    collection: Path, step: int | None, verify: Verify = verify_checkpoint
) -> Artifact[CheckpointManifest]:
    """Open and verify the checkpoint of `step`, or the newest intact one for None.

    Raises `ArtifactError` if there is none, or none of this step.
    """
    steps = checkpoint_steps(collection)
    if not steps:
        raise no_checkpoint_yet(collection)
    if step is not None and step not in steps:
        newest = list_names(map(str, reversed(steps)))
        raise ArtifactError(f"{collection}: has checkpoints after {newest}, none after {step}: --step={steps[-1]}")
    checkpoint = newest_checkpoint(collection, verify) if step is None else open_checkpoint(collection, step, verify)
    assert checkpoint is not None
    return checkpoint


def find_trained_corpus(checkpoint: Artifact[CheckpointManifest], root: Path) -> Artifact[CorpusManifest]:
    """Open the manifest of the own corpus of a checkpoint's run: below `root`, or where it was then.

    Raises `ArtifactError` where that corpus is gone or another one is in its place.
    """
    link = checkpoint.manifest.inputs[0]
    name = Recipe.model_validate(checkpoint.manifest.recipe).corpus.name
    for place in (Address(root, "corpus", name, link.id).path, Path(link.path)):
        try:
            found = open_artifact(place, CorpusManifest)
        except ArtifactError:
            continue
        if found.manifest.content_digest == link.content_digest:
            return found
    raise ArtifactError(
        f"{checkpoint.path}: was trained on the corpus {name}/{link.id} ({link.path}), which is gone, so its "
        f"tokenizer cannot be compared. Restore that corpus below {root / 'corpus'}; its manifest is enough."
    )
