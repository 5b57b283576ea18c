"""checkpoint/1: the state of a run after a step, complete for continuing it bit for bit.

`weights.safetensors` holds the float32 master weights under their Hugging Face names;
`moments.safetensors` holds AdamW's `first/<name>` and `second/<name>`. Data position, learning rate and
random numbers are functions of the step, so there is no other state.
"""

from __future__ import annotations

from typing import ClassVar

from services.common.artifacts.manifest import Count, Manifest, Record

WEIGHTS = "weights.safetensors"
MOMENTS = "moments.safetensors"


class CheckpointPayload(Record):
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


class CheckpointManifest(Manifest):
    SCHEMA: ClassVar[str] = "checkpoint/1"

    checkpoint: CheckpointPayload
