"""Defines checkpoint/3: the state of a run after a step, from which any layout of workers continues bit for bit.

`shard-00003.safetensors` holds the slices that rank 3 owned: float32 master weights and AdamW's moments. Their names
are those of `services.common.program.state`, such as `exp_avg/model.norm.weight[0:16]`. Together the files hold each
element once. The header of each file names the run, step, layout and rank that it comes from, and the manifest names
the same. There is no other state: learning rate and random numbers are functions of the step, and so is the data
position, apart from the batches that the run left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from services.common.artifacts.manifest import Count, Manifest, ManifestModel, Many, RelativePath, Sha256, Text
from services.common.input.problem_list import list_names
from services.common.recipe.schema import fingerprint


class LossSpikes(ManifestModel):
    """State of the loss-spike detector of a run with `train.loss_spike_sigma`."""

    skipped_batches: Many[Count]
    """Numbers of the batches that the run leaves out because the loss spiked on them, in ascending order."""
    recent_losses: Annotated[tuple[FiniteFloat, ...], Field(max_length=1_000)]
    """Losses of the newest steps that were applied, oldest first; the detector compares the next loss with them."""

    @field_validator("skipped_batches")
    @classmethod
    def _are_ascending(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        for earlier, later in pairwise(batches):
            if later <= earlier:
                raise ValueError(f"batch {later:,} comes after batch {earlier:,}, expected ascending numbers")
        return batches


class ShardOrigin(ManifestModel):
    """The state and the rank that a shard comes from. Its header and the manifest both hold this origin, so that no
    shard can take the place of another.
    """

    run: Text
    step: Count
    """Optimizer steps done."""
    skipped_steps: Count
    """Steps whose update was not applied because a gradient was not finite."""
    rank: Count
    """The worker that wrote the shard."""
    data_parallel_size: Count
    tensor_parallel_size: Count
    zero_stage: Literal[0, 1]
    program_fingerprint: Text
    """Fingerprint of the program that made the state; a copy of the run that another program continued differs."""
    payload_digest: Sha256
    """Hash of the manifest's payload without `shards`; this covers the batches that the run leaves out, too."""


class CheckpointPayload(ManifestModel):
    step: Count
    """Optimizer steps done."""
    tokens: Count
    """Tokens that all workers together have trained on, without those of skipped steps."""
    skipped_steps: Count
    """Steps whose update was not applied because a gradient was not finite."""
    data_parallel_size: Count
    tensor_parallel_size: Count
    zero_stage: Literal[0, 1]
    shards: dict[RelativePath, ShardOrigin]
    """Origin in the header of each shard, by the shard's file name."""
    program_fingerprint: Text
    waivers: Many[Text]
    """Flags such as `--allow-cold-compile` under which this state was made."""
    loss_spikes: LossSpikes | None = None
    """Absent in runs without `train.loss_spike_sigma`."""

    @model_serializer(mode="wrap")
    def _leaves_out_what_is_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "loss_spikes" or value is not None}

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
        return self.model_copy(update={"shards": {file: self.origin(run, rank) for file, rank in ranks.items()}})

    @model_validator(mode="after")
    def _skips_no_more_than_it_does(self) -> Self:
        if self.skipped_steps > self.step:
            raise ValueError(f"{self.skipped_steps:,} of {self.step:,} steps skipped")
        return self


class CheckpointManifest(Manifest):
    SCHEMA: ClassVar[str] = "checkpoint/3"

    checkpoint: CheckpointPayload

    @model_validator(mode="after")
    def _lists_shards(self) -> Self:
        others = [entry.path for entry in self.files if not _is_shard(entry.path)]
        if others or not self.files:
            raise ValueError(f"{list_names(others) if others else 'no file'}: expected shards, such as {shard_name(0)}")
        return self

    @model_validator(mode="after")
    def _is_trained_on_one_corpus(self) -> Self:
        schemas = [link.schema_id for link in self.inputs]
        if [schema.partition("/")[0] for schema in schemas] != ["corpus"]:
            raise ValueError(f"inputs: {list_names(schemas)}, expected one corpus")
        return self

    @model_validator(mode="after")
    def _knows_where_its_shards_come_from(self) -> Self:
        state, origins = self.checkpoint, self.checkpoint.shards
        if unknown := sorted({entry.path for entry in self.files} ^ set(origins)):
            raise ValueError(f"{', '.join(unknown[:4])}: expected both in `files` and in `checkpoint.shards`")
        for path, origin in origins.items():
            expected = state.origin(self.name, origin.rank)
            if origin != expected:
                raise ValueError(f"{path}: comes from another state: {explain_origins(origin, expected)}")
        ranks, num_workers = {origin.rank for origin in origins.values()}, state.num_workers
        if len(ranks) != num_workers or max(ranks) >= num_workers:
            raise ValueError(
                f"shards are of {len(ranks)} ranks up to {max(ranks):,}, expected one of each of the {num_workers:,} "
                f"workers ({state.data_parallel_size:,} x {state.tensor_parallel_size:,})"
            )
        return self


def explain_origins(found: ShardOrigin, expected: ShardOrigin) -> str:
    """Return the fields in which two origins differ, with both values."""
    theirs, ours = found.model_dump(), expected.model_dump()
    return ", ".join(f"{name} {theirs[name]}, expected {ours[name]}" for name in ours if theirs[name] != ours[name])


def shard_name(rank: int) -> str:
    """Return the name of a rank's shard, or of an import's file by its number."""
    return f"shard-{rank:05d}.safetensors"


def _is_shard(path: str) -> bool:
    return re.fullmatch(r"shard-[0-9]{5,9}\.safetensors", path) is not None


def checkpoint_id(step: int) -> str:
    """Return the name of a checkpoint's folder. From step 100,000,000 on the names do not sort as text."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's id; None for any other name, such as that of a folder that a person renamed."""
    found = re.fullmatch(r"step-([0-9]{8,19})", name)
    step = int(found[1]) if found else None
    return step if step is not None and checkpoint_id(step) == name else None
