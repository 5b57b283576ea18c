"""checkpoint/1: the state of a run after a step, complete for continuing it bit for bit.

`weights.safetensors` holds the float32 master weights under their Hugging Face names;
`moments.safetensors` holds AdamW's `first/<name>` and `second/<name>`. Data position, learning rate and
random numbers are functions of the step, so there is no other state.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self

from pydantic import model_validator

from services.common.artifacts.manifest import Count, Manifest, ManifestModel

WEIGHTS = "weights.safetensors"
MOMENTS = "moments.safetensors"


class CheckpointPayload(ManifestModel):
    step: Count
    """Optimizer steps done."""
    tokens: Count
    """Tokens trained on, all workers together."""
    skipped_steps: Count
    """Steps whose update was not applied because a gradient was not finite."""
    data_parallel_size: Count
    program_fingerprint: str
    waivers: tuple[str, ...]
    """Flags such as `--allow-cold-compile` under which this state was made."""

    @model_validator(mode="after")
    def _skips_no_more_than_it_does(self) -> Self:
        if self.skipped_steps > self.step:
            raise ValueError(f"{self.skipped_steps:,} of {self.step:,} steps skipped")
        return self


class CheckpointManifest(Manifest):
    SCHEMA: ClassVar[str] = "checkpoint/1"

    checkpoint: CheckpointPayload

    @model_validator(mode="after")
    def _lists_its_tensors(self) -> Self:
        self.require_listed([WEIGHTS, MOMENTS])
        return self


def checkpoint_id(step: int) -> str:
    """Name of the folder of the state after `step` steps. From step 100,000,000 on they do not sort as text."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's id; None for any other name, as that of a folder which a person has renamed."""
    found = re.fullmatch(r"step-([0-9]{8,19})", name)
    step = int(found[1]) if found else None
    return step if step is not None and checkpoint_id(step) == name else None
