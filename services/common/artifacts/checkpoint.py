"""checkpoint/2: the state of a run after a step, complete for continuing it bit for bit under any layout of workers.

`shard-00003.safetensors` holds what rank 3 owned: float32 slices of the master weights and of AdamW's moments. Their
names are those of `services.common.program.state`, such as `exp_avg/model.norm.weight[0:16]`. Together the files hold
each element once. Learning rate and random numbers are functions of the step, and so is the data position but for the
batches that the run left out: there is no other state.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator

from services.common.artifacts.manifest import Count, Manifest, ManifestModel

WEIGHTS_1 = "weights.safetensors"
"""Of checkpoint/1: whole weights by their names."""
MOMENTS_1 = "moments.safetensors"
"""Of checkpoint/1: whole moments, `first/<name>` and `second/<name>`."""


class LossSpikes(ManifestModel):
    """What a run with `train.loss_spike_sigma` knows of its losses."""

    skipped_batches: tuple[Count, ...]
    """Numbers of the batches that the run leaves out because the loss spiked on them, ascending."""
    recent_losses: Annotated[tuple[FiniteFloat, ...], Field(max_length=1_000)]
    """Of the newest steps that were applied, oldest first: what the next loss is compared with."""


class CheckpointPayload(ManifestModel):
    step: Count
    """Optimizer steps done."""
    tokens: Count
    """Tokens trained on, all workers together."""
    skipped_steps: Count
    """Steps whose update was not applied because a gradient was not finite."""
    data_parallel_size: Count
    tensor_parallel_size: Count
    program_fingerprint: str
    waivers: tuple[str, ...]
    """Flags such as `--allow-cold-compile` under which this state was made."""
    loss_spikes: LossSpikes | None = None
    """Absent in runs without `train.loss_spike_sigma`."""

    @model_serializer(mode="wrap")
    def _leaves_out_what_is_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "loss_spikes" or value is not None}

    @model_validator(mode="after")
    def _skips_no_more_than_it_does(self) -> Self:
        if self.skipped_steps > self.step:
            raise ValueError(f"{self.skipped_steps:,} of {self.step:,} steps skipped")
        return self


class CheckpointManifest(Manifest):
    SCHEMA: ClassVar[str] = "checkpoint/2"

    checkpoint: CheckpointPayload

    @classmethod
    def upgrade(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """checkpoint/1 was of whole models; its two files are read as they are (see `services.trainer.shards`)."""
        if raw.get("schema") != "checkpoint/1":
            return raw
        payload = raw.get("checkpoint")
        younger = {"tensor_parallel_size": 1}
        return {**raw, "schema": cls.SCHEMA, "checkpoint": younger | payload if isinstance(payload, dict) else payload}

    @model_validator(mode="after")
    def _lists_shards(self) -> Self:
        others = [entry.path for entry in self.files if not _is_shard(entry.path)]
        if others or not self.files:
            raise ValueError(f"{', '.join(others[:4]) or 'no file'}: expected shards, as {shard_name(0)} is one")
        return self


def shard_name(rank: int) -> str:
    """Of the file with what this rank owned."""
    return f"shard-{rank:05d}.safetensors"


def _is_shard(path: str) -> bool:
    return path in (WEIGHTS_1, MOMENTS_1) or re.fullmatch(r"shard-[0-9]{5,9}\.safetensors", path) is not None


def checkpoint_id(step: int) -> str:
    """Name of the folder of the state after `step` steps. From step 100,000,000 on they do not sort as text."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's id; None for any other name, as that of a folder which a person has renamed."""
    found = re.fullmatch(r"step-([0-9]{8,19})", name)
    step = int(found[1]) if found else None
    return step if step is not None and checkpoint_id(step) == name else None
