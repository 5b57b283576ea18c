"""Model, weights, tokens and settings that all measured trainers share."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from services.common.program.backends.native_device import CUBLAS_WORKSPACE
from services.common.program.transformer import Transformer
from services.common.recipe.schema import Recipe
from services.common.testing.models import initialize
from services.common.testing.recipes import load_with, write_recipe

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
    "optimizer__min_learning_rate": 1e-3,
    "optimizer__weight_decay": 0.1,
    "optimizer__max_grad_norm": 1.0,
    "train__dtype": "bfloat16",
}
"""Recipe values of a Llama with 24.4 million parameters, for two CPU cores."""


@dataclass(frozen=True)
class Workbench:
    folder: Path
    steps: int
    """Number of measured steps of a row in one round."""
    threads: int
    recipe_file: Path | None = None
    """The recipe of model, optimizer, micro-batch and device; None: RECIPE, on the CPU. Its smallest learning rate is
    that of all steps."""
    num_micro_batches: int = 1
    """Micro-batches of a step."""
    reduction: str = "exact"
    """`train.reduction` of our rows."""

    @property
    def weights(self) -> Path:
        """File of the initial weights, under Hugging Face's names."""
        return self.folder / "model.safetensors"

    @property
    def num_steps(self) -> int:
        return STEPS_LEFT_OUT + self.steps

    def recipe(self, *, is_compiled: bool = False) -> Recipe:
        path = self.recipe_file or write_recipe(self.folder, **RECIPE)
        given = load_with(path)
        size = given.batch.micro_batch_size * self.num_micro_batches
        return load_with(
            path,
            parallel__threads_per_worker=str(self.threads),
            batch__global_batch_size=str(size),
            train__reduction=self.reduction,
            optimizer__learning_rate=str(given.optimizer.min_learning_rate),  # a constant rate
            optimizer__warmup_steps="0",
            train__max_steps=str(self.num_steps),
            compile__enabled=json.dumps(is_compiled),
        )

    @property
    def device(self) -> str:
        """torch's name of the device that all rows compute on."""
        device = self.recipe().parallel.device
        if device == "cuda":
            os.environ.setdefault(*CUBLAS_WORKSPACE)  # for all rows: cuBLAS reads it once
        return device

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
        model = Transformer(recipe.model, recipe.corpus.sequence_length)
        initialize(model, recipe.model, recipe.train.seed)
        safetensors.torch.save_file(model.state_dict(), self.weights, metadata={"format": "pt"})

    def read_weights(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.weights, device=self.device)

    def tokens(self, step: int) -> Tensor:
        """Return the tokens of a step's batch on the host: int64 [sequences, length + 1]."""
        recipe = self.recipe()
        shape = (recipe.batch.global_batch_size, recipe.corpus.sequence_length + 1)
        return torch.randint(recipe.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))
