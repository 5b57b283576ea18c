"""The recipe's sections of a run: `[train]` and `[checkpoint]`."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from services.common.recipe.section import COMPILED, MAX_NAME_LENGTH, TRACED, TRAINED, Identity, Positive, Section

ActivationCheckpointing = Literal["none", "selective", "full"]
_CorpusName = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*(/[0-9a-f]{1,16})?$", max_length=MAX_NAME_LENGTH + 17)
]
MAX_WEIGHTS = 10_000
"""Largest sum of a mixture's weights, which is the period of its order."""


def _reduce_weights(weights: dict[str, int]) -> dict[str, int]:
    """Divide weights by their greatest common divisor, and sort them by name: one way to write each mixture."""
    divisor = math.gcd(*weights.values())
    if (total := sum(weights.values()) // divisor) > MAX_WEIGHTS:
        raise ValueError(f"the weights sum to {total:,} in lowest terms, expected at most {MAX_WEIGHTS:,}: round them")
    return {name: weights[name] // divisor for name in sorted(weights)}


_Mixture = Annotated[dict[_CorpusName, Positive], Field(min_length=1), AfterValidator(_reduce_weights)]


class Branch(Section):
    """A checkpoint of another run below the same root, with which a run begins: weights, moments, the number of steps,
    and the position in the data. The model's shapes and the tokenizer must be the parent's."""

    run: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*-[0-9a-f]{8}$", max_length=MAX_NAME_LENGTH + 9)]
    """Name of the parent run, as `millrace runs` lists it."""
    step: Annotated[int, Field(ge=0)]
    """Step after which the parent has a checkpoint. The branch counts its steps from there on."""
    data: Literal["continue", "restart"] = "continue"
    """First sample of the branch. `continue` goes on after the last sample that the nearest ancestor with this corpus
    took, or begins a corpus that none of them has seen. `restart` begins the corpus again."""


class Train(Section):
    max_steps: Positive
    seed: Annotated[int, Field(ge=0, lt=2**63), TRAINED] = 0
    """Seed of the initial weights, and of the order of the samples unless `data_seed` is given."""
    data_seed: Annotated[int, Field(ge=0, lt=2**63, default_factory=lambda known: known["seed"]), TRAINED]
    """Seed of the order of the samples. Default: the value of `seed`."""
    initial_weights: Annotated[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None, TRAINED] = None
    """Digest of the imported weights that the run begins with, as `import` prints it; without it, they are random."""
    branch: Annotated[Branch | None, TRAINED] = None
    """Checkpoint of another run with which the run begins."""
    mixture: Annotated[_Mixture | None, Identity(("checkpoint",), is_default_left_out=True)] = None
    """Weights of published corpora: with `wiki = 3` and `code = 1` three quarters of all samples come from `wiki`. A
    key is the recipe's own `corpus.name`, which is always among them, or NAME or NAME/ID of another corpus below the
    root, where ID may be the beginning of one. All have one vocabulary. Without it the run takes its own corpus alone.
    """
    dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Type of matrix products. Master weights, moments and reductions are always float32."""
    param_dtype: Annotated[Literal["float32", "bfloat16"], TRACED] = "float32"
    """Type of all weights in the model, of a micro-batch's gradients, and of activations between layers. `bfloat16`
    needs dtype `bfloat16`. The optimizer then holds float32 master weights, and each update rounds the model's weights
    from them."""
    attention_mask: Annotated[Literal["causal", "block_causal"], TRACED] = "causal"
    """Tokens that a token attends to: with `causal` all before it in its row, with `block_causal` only those of its
    document, whose positions begin at 0. In both modes a document's last token predicts the next document's first."""
    z_loss: Annotated[float, Field(ge=0), TRACED] = 0.0
    """Coefficient of the mean of log(Z)^2 over tokens, which the gradient includes (PaLM, arXiv 2204.02311, has 1e-4).
    The reported losses of training and evaluation are cross-entropy alone. 0 switches it off."""
    activation_checkpointing: Annotated[ActivationCheckpointing, COMPILED] = "none"
    """Part of a layer's forward pass that the backward pass computes again instead of keeping it: nothing (`none`), all
    but matrix products and attention (`selective`), or all (`full`). The bits are the same, except on `xla`."""
    reduction: Annotated[Literal["exact", "fast"], TRAINED] = "exact"
    """`exact` sums micro-batches in one fixed binary tree, so that any data-parallel size up to 64 gives the same bits;
    for m micro-batches a worker then holds log2(m) sums of the gradient. `fast` sums those of a worker one after the
    other into one sum, and leaves the sum over workers to the library."""
    evaluation_interval_steps: Positive = 100
    """Steps between two evaluations."""
    evaluation_tokens: Annotated[Annotated[int, Field(ge=0, lt=2**63)] | None, TRAINED] = None
    """Targets of the validation split in an evaluation, rounded up to whole rows; without it, all of them. Each
    evaluation of each run takes the same ones. 0 switches evaluation off. A target costs a third of a trained token."""
    health_interval_steps: Annotated[int, Field(ge=0)] = 100
    """Steps between two measurements of the run's health: norms of layer groups, the largest logit and the size of
    activations. 0 switches them off. A measurement takes as long as a forward pass."""
    time_limit_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which a training command stops with a committed checkpoint and exit code 75."""
    max_consecutive_skipped_steps: Annotated[int, Field(ge=0)] = 10
    """Most steps in a row whose gradient is not finite, and which update nothing. One more ends the run with exit 2."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Most times that a command starts lost workers again without a new checkpoint in between."""
    watchdog_factor: Annotated[float, Field(ge=0)] = 10.0
    """Median step times after which a worker's step counts as hung: the worker writes the stacks of its threads and
    ends, and all workers start again. 0 switches the watchdog off."""
    watchdog_min_seconds: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Seconds that a step always has before the watchdog ends it. Collectives end a minute after twice the limit."""
    loss_spike_sigma: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviations above the trend of the last losses or gradient norms beyond which a step deviates. 0 switches
    the detection of loss spikes off, and 6 is usual."""
    loss_spike_window: Annotated[int, Field(ge=16, le=1_000)] = 128
    """Number of last losses that the next one is compared with. Before a quarter of them exist, no step deviates."""
    loss_spike_patience_steps: Annotated[int, Field(ge=1, le=1_000)] = 16
    """Number of losses in a row that must deviate before a spike is confirmed. Fewer heal by themselves."""
    loss_spike_rollback_steps: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Steps before the first one of a confirmed spike to which the run goes back. It leaves out all batches from there
    to the last one of the spike."""
    loss_spike_max_rollbacks: Annotated[int, Field(ge=0)] = 20
    """Number of times that a run may go back because of loss spikes. It goes on with a warning after the next spike."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.param_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(f"train.param_dtype 'bfloat16' needs train.dtype 'bfloat16', got {self.dtype!r}")
        if self.branch and self.initial_weights:
            raise ValueError(
                f"train.branch {self.branch.run} and train.initial_weights {self.initial_weights[:12]} both name the "
                f"weights that the run begins with: leave one out"
            )
        if self.branch and self.branch.step >= self.max_steps:
            raise ValueError(f"train.branch.step {self.branch.step} must be below train.max_steps {self.max_steps}")
        return self

    @property
    def first_step(self) -> int:
        """Steps that were done when the run began: those of its parent, or 0."""
        return self.branch.step if self.branch else 0


class Checkpoint(Section):
    interval_steps: Positive = 100
    """Steps between two checkpoints."""
    memory_interval_steps: Positive | None = None
    """Steps between two copies of the state in the memory of the nodes (/dev/shm), each also on the next node: a killed
    worker or a lost node then costs at most these steps, and the write and the read of a checkpoint."""
    keep_latest: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints that are kept; at least 2, because the newest may be damaged."""
    keep_interval_steps: Positive | None = None
    """Checkpoints whose step is a multiple of this number are kept for good."""
