"""Finds the checkpoint with which a branch begins, and the position in the data that follows from it.

A branch is a run of its own: its name hashes its recipe, its corpus and the digest of the parent's checkpoint.
Everything that it inherits is a function of that checkpoint's manifest. The manifests of its own checkpoints repeat it,
so the parent's checkpoint is needed for the start alone. The settings of the parent's run decide how long it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.artifacts.checkpoint import Ancestor, CheckpointManifest, LossSpikes, checkpoint_id
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import Address, Artifact
from services.common.artifacts.upstream import advise_tokenizer
from services.common.errors import ArtifactError, RecipeError
from services.common.problem_list import list_names, list_problems
from services.common.recipe.changes import changed_fields
from services.common.recipe.derived import corpus_weights
from services.common.recipe.schema import Recipe
from services.common.recipe.training import Branch, Train
from services.trainer.checkpoints.lookup import find_trained_corpus, newest_checkpoint, open_checkpoint, run_command
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.health.loss_spikes import SpikeDetector
from services.trainer.job import NO_LINEAGE, Lineage, RunCorpus, checkpoint_collection, run_name
from services.trainer.mixture import count_taken

_SHAPE = (
    "vocab_size",
    "padded_vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_norm",
    "tie_word_embeddings",
)
"""Fields of the model that decide the shapes of the weights and what their rows mean."""


def find_lineage(root: Path, recipe: Recipe, corpus: RunCorpus) -> Lineage:
    """Return the ancestors of the recipe's run and its position in the data.

    They follow from the parent's checkpoint or, where the parent's run has removed it or written it again, from the
    branch's own checkpoints. The search for these reads one manifest of each run of the recipe's name.

    Raises `ArtifactError` where both are gone, and `RecipeError` where the parent has another model than the recipe, or
    the branch would see data again that it does not ask for.
    """
    branch = recipe.train.branch
    if branch is None:
        return NO_LINEAGE
    try:
        lineage = _descend(open_parent(root, branch), recipe, corpus)
    except ArtifactError:
        if own := _find_own(root, recipe, corpus):
            return own
        raise
    if checkpoint_steps(checkpoint_collection(root, run_name(recipe, corpus, lineage.parent))):
        return lineage
    return _find_own(root, recipe, corpus) or lineage  # of before the parent wrote the step again


def open_parent(root: Path, branch: Branch) -> Artifact[CheckpointManifest]:
    """Read the manifest of the parent's checkpoint. The files are verified by the workers that load them.

    Raises `ArtifactError`, which names the steps that there are, where it is gone or damaged.
    """
    address = Address(root, "checkpoint", branch.run, checkpoint_id(branch.step))
    if (address.path / MANIFEST).exists():
        return open_checkpoint(address.collection, branch.step, lambda _: None)
    steps = checkpoint_steps(address.collection)
    branches = f"Branch from one of them, as --train.branch.step={steps[-1]}, restore" if steps else "Restore"
    raise ArtifactError(
        f"{address.collection}: train.branch.step is {branch.step}, but the run has checkpoints only after "
        f"{list_names(map(str, reversed(steps)))}. {branches} step {branch.step} from a copy, or find the run: "
        f"`{run_command(root, 'runs')}`. A run keeps its last checkpoint.keep_latest checkpoints and the multiples of "
        f"checkpoint.keep_interval_steps."
    )


def require_same_vocabulary(
    root: Path, parent: Artifact[CheckpointManifest], recipe: Recipe, corpus: RunCorpus
) -> None:
    """Raise `RecipeError` where the parent was trained on ids of another tokenizer, and `ArtifactError` where its
    corpus is gone, so that the tokenizers cannot be compared.
    """
    if not set(_digests(parent)).isdisjoint(corpus.content_digests):
        return
    found = find_trained_corpus(parent, root)
    before, now = found.manifest.corpus.vocabulary, corpus.payload.vocabulary
    if before.sha256 != now.sha256:
        raise RecipeError(
            f"{parent.path}: was trained with the tokenizer {before.sha256[:12]} of {found.path}, but {corpus.path} "
            f"has {now.sha256[:12]}: its ids mean other text to these weights. "
            f"{advise_tokenizer(found, recipe.corpus.name)}"
        )


def inherit_loss_spikes(
    parent: Artifact[CheckpointManifest], recipe: Recipe, corpus: RunCorpus, lineage: Lineage
) -> LossSpikes | None:
    """Return the parent's state of the loss-spike detector where its batches have the same numbers in the branch.

    A branch with changed settings compares its losses with its own alone, because another mask, rate, batch or mixture
    moves them for good, and may go back as often as a new run.
    """
    theirs, state = Recipe.model_validate(parent.manifest.recipe), parent.manifest.checkpoint
    is_same_batch = (
        recipe.batch.global_batch_size == theirs.batch.global_batch_size
        and corpus.content_digests == _digests(parent)
        and lineage.data_offset_samples == state.data_offset_samples
    )
    if not is_same_batch:
        return None
    return state.loss_spikes.for_other_losses() if _changes(parent, recipe) else state.loss_spikes


def describe_parent(root: Path, recipe: Recipe, corpus: RunCorpus, lineage: Lineage) -> str:
    """Describe where a new branch begins, and the settings in which it differs from its parent."""
    parent = lineage.parent
    assert parent
    assert recipe.train.branch
    changes = list_problems(_changes(open_parent(root, recipe.train.branch), recipe), "fields that differ")
    firsts = _first_samples(lineage.ancestors, recipe, corpus.content_digests)
    takes = " and ".join(f"{first:,} of {part.name}" for part, first in zip(corpus.parts, firsts, strict=True))
    return (
        f"{parent.run} after step {parent.step:,} (digest {parent.content_digest[:12]}) and takes sample "
        f"{takes} next; {', '.join(changes) or 'no field differs'}"
    )


def _changes(parent: Artifact[CheckpointManifest], recipe: Recipe) -> list[str]:
    """Describe the fields in which a branch differs from its parent, besides `train.branch` itself."""
    changed = changed_fields(parent.manifest.recipe, recipe, "checkpoint")
    return [change for change in changed if not change.startswith("train.branch")]


def _find_own(root: Path, recipe: Recipe, corpus: RunCorpus) -> Lineage | None:
    """Return the lineage that checkpoints of the branch itself name; None if it has none."""
    for collection in sorted((root / "checkpoint").glob(f"{recipe.name}-*"), reverse=True):
        with suppress(ArtifactError):
            checkpoint = newest_checkpoint(collection, lambda _: None)
            state = checkpoint and checkpoint.manifest.checkpoint
            if state and state.parent and run_name(recipe, corpus, state.parent) == collection.name:
                return Lineage(state.ancestors, state.data_offset_samples)
    return None


def _descend(parent: Artifact[CheckpointManifest], recipe: Recipe, corpus: RunCorpus) -> Lineage:
    theirs, state = Recipe.model_validate(parent.manifest.recipe), parent.manifest.checkpoint
    _require_same_shapes(parent.path, theirs, recipe)
    detector = SpikeDetector(theirs)
    detector.go_back(state.loss_spikes)
    next_batch = detector.batch_of(state.step)
    next_sample = state.data_offset_samples + next_batch * theirs.batch.global_batch_size
    weights, digests = list(corpus_weights(theirs).values()), _digests(parent)
    taken = (find_starts(state.ancestors, theirs, digests) + count_taken(weights, next_sample)).tolist()
    left = Ancestor(
        run=parent.manifest.name,
        step=state.step,
        skipped_steps=state.skipped_steps,
        content_digest=parent.manifest.content_digest,
        tokens=state.tokens,
        corpus_digest=digests[0],
        data_seed=theirs.train.data_seed,
        next_sample=next_sample,
        next_samples=dict(zip(digests, taken, strict=True)) if len(digests) > 1 else {},
    )
    ancestors = (*state.ancestors, left)
    first = next_sample if corpus.mixed else _first_sample(ancestors, recipe.train, corpus.link.content_digest)
    lineage = Lineage(ancestors, first - next_batch * recipe.batch.global_batch_size)
    if inherit_loss_spikes(parent, recipe, corpus, lineage) is None:
        lineage = Lineage(ancestors, first - state.step * recipe.batch.global_batch_size)
    return lineage


def find_starts(ancestors: tuple[Ancestor, ...], recipe: Recipe, digests: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the numbers of the corpora's samples at the run's sample 0, which is that of a branch's first ancestor.

    They are 0 except in a branch with a mixture; in one with a single corpus the offset has the position.
    """
    if not ancestors or len(digests) == 1:
        return np.zeros(len(digests), dtype=np.int64)
    begun = ancestors[-1].next_sample
    return np.array(_first_samples(ancestors, recipe, digests)) - count_taken([*corpus_weights(recipe).values()], begun)


def _digests(checkpoint: Artifact[CheckpointManifest]) -> list[str]:
    return [link.content_digest for link in checkpoint.manifest.inputs]


def _first_samples(ancestors: tuple[Ancestor, ...], recipe: Recipe, digests: Sequence[str]) -> tuple[int, ...]:
    return tuple(_first_sample(ancestors, recipe.train, digest) for digest in digests)


def _first_sample(ancestors: tuple[Ancestor, ...], train: Train, digest: str) -> int:
    """Return the number of the first sample that a run takes of the corpus with this digest."""
    seen = next((each for each in reversed(ancestors) if digest in {each.corpus_digest, *each.next_samples}), None)
    if seen is None or (train.branch and train.branch.data == "restart"):
        return 0
    next_sample = seen.next_samples.get(digest, seen.next_sample)
    if seen.data_seed != train.data_seed:
        raise RecipeError(
            f"train.data_seed is {train.data_seed}, but {seen.run} has taken {next_sample:,} samples of the same "
            f"corpus in the order of seed {seen.data_seed}: in another order the branch would see some of them again. "
            f"Set --train.data_seed={seen.data_seed}, or ask for it with --train.branch.data=restart."
        )
    return next_sample


def _require_same_shapes(parent: Path, theirs: Recipe, recipe: Recipe) -> None:
    differences = [
        f"  model.{name}: the parent has {before}, the recipe {now}"
        for name in _SHAPE
        if (before := getattr(theirs.model, name)) != (now := getattr(recipe.model, name))
    ]
    if differences:
        raise RecipeError(
            f"{parent}: train.branch has the weights of another model:\n" + "\n".join(differences) + "\nA branch keeps "
            "these values of its parent."
        )
