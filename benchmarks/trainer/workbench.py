"""Model, weights, tokens and settings that all measured trainers share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from services.common.program.llama import Llama
from services.common.recipe.schema import Recipe
from services.common.testing.models import initialize
from services.common.testing.recipes import load_with, write_recipe

RATE = 1e-3
STEPS_LEFT_OUT = 3
"""Number of steps at the start of a row that are not measured: they compile and fill caches."""
RECIPE: dict[str, Any] = {
    "corpus__sequence_length": 256,
    "tokenizer__train__vocab_size": 32_000,
    "model__vocab_size": 32_000,
    "model__hidden_size": 288,
    "model__intermediate_size": 768,
    "model__num_hidden_layers": 6,
    "model__num_attention_heads": 6,
    "model__num_key_value_heads": 6,
    "batch__micro_batch_size": 4,
    "batch__global_batch_size": 4,
    "optimizer__learning_rate": RATE,
    "optimizer__min_learning_rate": RATE,
    "optimizer__warmup_steps": 0,
    "optimizer__weight_decay": 0.1,
    "optimizer__max_grad_norm": 1.0,
    "train__dtype": "bfloat16",
}
"""Recipe values of a Llama with 24.4 million parameters, and AdamW at a constant rate."""


@dataclass(frozen=True)
class Workbench:
    folder: Path
    steps: int
    """Number of measured steps of a row in one round."""
    threads: int

    @property
    def weights(self) -> Path:
        """File of the initial weights, under Hugging Face's names."""
        return self.folder / "model.safetensors"

    @property
    def num_steps(self) -> int:
        return STEPS_LEFT_OUT + self.steps

    def recipe(self, *, is_compiled: bool = False) -> Recipe:
        path = write_recipe(self.folder, **RECIPE)
        changes = {"parallel__threads_per_worker": str(self.threads), "train__max_steps": str(self.num_steps)}
        return load_with(path, **changes, compile__enabled=json.dumps(is_compiled))

    def hugging_face_config(self) -> dict[str, Any]:
        recipe = self.recipe()
        fields = recipe.model.model_dump(exclude={"preset", "rope_theta", "rope_scaling"})
        rope = {"rope_type": "default", "rope_theta": recipe.model.rope_theta}
        length = recipe.corpus.sequence_length
        return {**fields, "rope_parameters": rope, "max_position_embeddings": length} | {
            "attn_implementation": "sdpa",
            "use_cache": False,
        }

    def fill(self) -> None:
        recipe = self.recipe()
        model = Llama(recipe.model, recipe.corpus.sequence_length)
        initialize(model, recipe.model, recipe.train.seed)
        safetensors.torch.save_file(model.state_dict(), self.weights, metadata={"format": "pt"})

    def read_weights(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.weights)

    def tokens(self, step: int) -> Tensor:
        """Return the tokens of a step's batch: int64 [4, 257]."""
        recipe = self.recipe()
        shape = (recipe.batch.global_batch_size, recipe.corpus.sequence_length + 1)
        return torch.randint(recipe.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))
