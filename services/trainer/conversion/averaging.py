"""Averages the weights of a run's last checkpoints.

The mean of checkpoints along a run does for the weights what a falling learning rate does: LAWA (arXiv 2306.03241)
averages distant checkpoints of a run with a high rate, and Llama 3 (arXiv 2407.21783, section 3.4.3) those of its
annealing phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.input.problem_list import list_names
from services.trainer.checkpoints.lookup import open_checkpoint, require_of_run, verify_checkpoint
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.corpus import describe_corpus
from services.trainer.run import Run


def open_last(run: Run, count: int) -> list[Artifact[CheckpointManifest]]:
    """Open and verify the last `count` checkpoints of a run, oldest first; the last is the run's newest intact one.

    Raises `ArtifactError` where the run has kept fewer, or one of them is damaged.
    """
    newest, collection = run.checkpoint.manifest.checkpoint.step, run.checkpoint.path.parent
    steps = [step for step in checkpoint_steps(collection) if step <= newest]
    if len(steps) < count:
        policy = run.recipe.checkpoint
        raise ArtifactError(
            f"{collection}: has {len(steps)} checkpoints to average, not {count}: after the steps "
            f"{list_names(map(str, steps))}. A run keeps its last checkpoint.keep_latest ({policy.keep_latest}) "
            f"checkpoints and the multiples of checkpoint.keep_interval_steps "
            f"({policy.keep_interval_steps or 'none'}). Average at most {len(steps)}, or raise these settings while "
            f"the run goes on."
        )
    return [*(_open_earlier(run, step) for step in steps[-count:-1]), run.checkpoint]


def _open_earlier(run: Run, step: int) -> Artifact[CheckpointManifest]:
    checkpoint = open_checkpoint(run.checkpoint.path.parent, step, verify_checkpoint)
    require_of_run(checkpoint, run.recipe, describe_corpus(run.corpus))
    return checkpoint


def read_means(readers: Sequence[ShardReader], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the means of full weights over checkpoints, by name, rounded to float32 once.

    The sums are float64 and of one weight at a time, so the memory does not grow with the number of checkpoints. The
    mean of one checkpoint has its bits.
    """
    return {name: _read_mean(readers, name) for name in names}


def _read_mean(readers: Sequence[ShardReader], name: str) -> Tensor:
    first, *others = readers
    total = first.read_weights([name], allows_non_finite=True)[name].double()
    for reader in others:
        total += reader.read_weights([name], allows_non_finite=True)[name]
    return (total / len(readers)).to(torch.float32)
