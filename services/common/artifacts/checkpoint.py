"""Defines checkpoint/4: the state of a run after a step, from which any layout of workers continues bit for bit.

`shard-00003.safetensors` holds the slices that rank 3 owned: float32 master weights and AdamW's moments. Their names
are those of `services.common.program.state`, such as `exp_avg/model.norm.weight[0:16]`. Together the files hold each
element once. The header of each file names the run, step, layout and rank that it comes from, and the manifest names
the same. `index.safetensors` says which file has which slice, for workers of another layout: int64 [slices, 7] for each
kind of state and parameter, such as `exp_avg/model.norm.weight`, of `StateSlice.row` and the number in the file's name.

There is no other state: learning rate and random numbers are functions of the step, and so is the data
position, apart from the batches that the run left out, and from the sample at which a branch of another run began.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator

from services.common.artifacts.manifest import Count, Manifest, ManifestModel, RelativePath, Sha256
from services.common.recipe.schema import fingerprint

INDEX_FILE = "index.safetensors"


class BatchRange(ManifestModel):
    """Batches `first` to `last`, both included."""

    first: Count
    last: Count

    def __len__(self) -> int:
        return self.last - self.first + 1


class LossSpikes(ManifestModel):
    """State of the loss-spike detector. A run without `train.loss_spike_sigma` keeps the skipped batches alone."""

    skipped_batches: tuple[BatchRange, ...] = ()
    """Batches that the run leaves out because of loss spikes: ascending ranges with batches between them."""
    rollbacks: Count = 0
    """Number of times that the run went back."""
    recent_losses: tuple[FiniteFloat, ...] = ()
    """Losses of the newest steps that did not deviate, oldest first; the detector compares the next loss with them."""
    recent_gradient_norms: tuple[FiniteFloat, ...] = ()
    """Gradient norms of the same steps."""
    first_deviating_step: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """First step of the deviation that was going on after the checkpoint's step."""
    deviating_losses: Count = 0
    """Number of losses in a row, up to the checkpoint's step, that were above their limit."""

    def for_other_losses(self) -> LossSpikes:
        """Return the state for a run whose losses cannot be compared with these: only the skipped batches stay."""
        return LossSpikes(skipped_batches=self.skipped_batches)


def merge_ranges(ranges: Iterable[BatchRange]) -> tuple[BatchRange, ...]:
    """Return the fewest ranges with the same batches, ascending."""
    merged: list[BatchRange] = []
    for each in sorted(ranges, key=lambda one: one.first):
        if merged and each.first <= merged[-1].last + 1:
            merged[-1] = BatchRange(first=merged[-1].first, last=max(merged[-1].last, each.last))
        else:
            merged.append(each)
    return tuple(merged)


class Ancestor(ManifestModel):
    """A checkpoint with which another run began as a branch, and the data that had been seen until then."""

    run: str
    """The run that made the checkpoint."""
    step: Count
    skipped_steps: Count
    """Steps that updated no weight, because a gradient was not finite."""
    content_digest: Sha256
    """Digest of the checkpoint's files."""
    tokens: Count
    """Tokens that the run and its own ancestors had trained on."""
    corpus_digest: Sha256
    """Digest of the corpus that the run trained on, its own of those of a mixture."""
    data_seed: Count
    """Seed of the order in which the run took the samples of that corpus."""
    next_sample: Count
    """Number of the next sample of that corpus in that order: those before it were taken or left out."""
    next_samples: Annotated[dict[Sha256, Count], Field(default_factory=dict, exclude_if=operator.not_)]
    """The same of each corpus of a mixture, by its digest; then `next_sample` counts all. Absent without a mixture."""


class ShardOrigin(ManifestModel):
    """The state and the rank that a shard comes from, as its header and the manifest both say."""

    run: str
    step: Count
    """Optimizer steps done."""
    skipped_steps: Count
    """Steps whose update was not applied because a gradient was not finite."""
    rank: Count
    """The worker that wrote the shard."""
    data_parallel_size: Count
    tensor_parallel_size: Count
    zero_stage: Literal[0, 1, 2, 3]
    program_fingerprint: str
    """Fingerprint of the program that made the state; a copy of the run that another program continued differs."""
    payload_digest: Sha256
    """Hash of the manifest's payload without `shards`; this covers the batches that the run leaves out, too."""


class ImportedModel(ManifestModel):
    """Hugging Face's configuration of the weights with which the run, or an ancestor of it, began, for exports."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]


class CheckpointPayload(ManifestModel):
    step: Count
    """Optimizer steps done."""
    tokens: Count
    """Tokens that all workers together have trained on, without those of skipped steps."""
    skipped_steps: Count
    """Steps whose update was not applied because a gradient was not finite."""
    data_parallel_size: Count
    tensor_parallel_size: Count
    zero_stage: Literal[0, 1, 2, 3]
    shards: dict[RelativePath, ShardOrigin]
    """Origin in the header of each shard, by the shard's file name."""
    program_fingerprint: str
    waivers: tuple[str, ...]
    """Flags such as `--allow-cold-compile` under which this state was made."""
    loss_spikes: LossSpikes = LossSpikes()
    ancestors: tuple[Ancestor, ...] = ()
    """Checkpoints with which a branch, its parent and so on began, oldest first. Absent without a branch."""
    data_offset_samples: Annotated[int, Field(gt=-(2**63), lt=2**63)] = 0
    """Sample with which batch 0 would have begun: batch b takes the samples from data_offset_samples + b *
    batch.global_batch_size on. Below 0 where a branch has larger batches, or another corpus. Absent where it is 0."""
    imported: ImportedModel | None = None
    """Configuration of the imported model. Absent where the run began with random weights."""

    @model_serializer(mode="wrap")
    def _leaves_out_what_is_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        optional = ("ancestors", "data_offset_samples", "imported")
        return {name: value for name, value in fields.items() if name not in optional or value}

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    def origin(self, run: str, rank: int) -> ShardOrigin:
        """Return the origin of the shard that this rank writes of this state."""
        said = self.model_dump(mode="json", exclude={"shards"})
        shared = {name: said[name] for name in ShardOrigin.model_fields if name in said}
        return ShardOrigin(run=run, rank=rank, payload_digest=fingerprint(said), **shared)

    def with_shards(self, run: str, ranks: Mapping[str, int]) -> Self:
        """Return the payload with these shards of the run; `ranks` maps file names to the ranks that write them."""
        first = self.origin(run, rank=0)
        shards = {file: first.model_copy(update={"rank": rank}) for file, rank in ranks.items()}
        return self.model_copy(update={"shards": shards})

    @property
    def parent(self) -> Ancestor | None:
        """Checkpoint with which the run began as a branch; None for other runs."""
        return self.ancestors[-1] if self.ancestors else None


class CheckpointManifest(Manifest):
    SCHEMA: ClassVar[str] = "checkpoint/4"

    checkpoint: CheckpointPayload

    @model_validator(mode="after")
    def _lists_shards_and_their_index(self) -> Self:
        self.require_listed([INDEX_FILE, *self.checkpoint.shards])
        return self


def compare_origins(found: ShardOrigin, expected: ShardOrigin) -> str:
    """Return the fields in which two origins differ, with both values."""
    theirs, ours = found.model_dump(), expected.model_dump()
    return ", ".join(f"{name} {theirs[name]}, expected {ours[name]}" for name in ours if theirs[name] != ours[name])


def shard_name(rank: int) -> str:
    """Return the name of a rank's shard, or of an import's file by its number."""
    return f"shard-{rank:05d}.safetensors"


def checkpoint_id(step: int) -> str:
    """Return the name of a checkpoint's folder. From step 100,000,000 on the names do not sort as text."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's id; None for any other name, such as that of a folder that a person renamed."""
    found = re.fullmatch(r"step-([0-9]{8,19})", name)
    step = int(found[1]) if found else None
    return step if step is not None and checkpoint_id(step) == name else None
