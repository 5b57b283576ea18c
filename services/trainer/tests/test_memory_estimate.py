"""The memory estimate is near the peak of a traced step, whose collectives have the sizes that a ring and XLA allow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.program.backends.neuron_xla import MAX_COLLECTIVE_BYTES
from services.common.recipe.memory_estimate import FLOAT32_BYTES, memory_of_worker
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import load_with, write_recipe
from services.trainer.tests.step_trace import trace_step

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
LLAMA_2_7B, LLAMA_3_8B = (RECIPES / f"{name}-trn1.toml" for name in ("llama2-7b", "llama3-8b"))
IN_BFLOAT16 = {"train__dtype": "bfloat16", "train__param_dtype": "bfloat16", "train__reduction": "fast"}
ONE_GPU = {"parallel__device": "cuda", "parallel__data_parallel_size": "1"}
SPLIT = {"parallel__tensor_parallel_size": "4"}


def wide(folder: Path, **overrides: str) -> Recipe:
    """4 layers of Llama 3's shape, an eighth as wide: wide enough that layers are larger than norms and tables."""
    path = write_recipe(folder, tokenizer__train=None, tokenizer__model="nowhere")
    shape = {"model__num_hidden_layers": "4", "model__num_attention_heads": "8", "model__num_key_value_heads": "2"}
    shape |= {"model__hidden_size": "512", "model__intermediate_size": "1792", "model__vocab_size": "512"}
    shape |= {"parallel__data_parallel_size": "4", "batch__micro_batch_size": "1", "batch__global_batch_size": "16"}
    shape |= {"corpus__sequence_length": "512"}
    return load_with(path, **(shape | overrides))


@pytest.mark.parametrize(
    ("checkpointing", "overrides"),
    [
        ("none", {}),
        ("full", {**SPLIT, **IN_BFLOAT16, "parallel__zero_stage": "1"}),
        pytest.param("selective", SPLIT, marks=pytest.mark.slow),
        pytest.param("none", {**IN_BFLOAT16, **ONE_GPU}, marks=pytest.mark.slow),
        pytest.param(
            "selective", {**SPLIT, **IN_BFLOAT16, "parallel__reduce_dtype": "float32"}, marks=pytest.mark.slow
        ),
    ],
    ids=["none", "full", "selective", "one GPU", "float32 sums"],
)
def test_the_estimate_of_memory_is_near_what_a_step_of_the_program_holds(
    tmp_path: Path, checkpointing: str, overrides: dict[str, str]
) -> None:
    recipe = wide(tmp_path, train__activation_checkpointing=checkpointing, **overrides)

    assert memory_of_worker(recipe).peak_bytes == pytest.approx(trace_step(recipe).peak_bytes, rel=0.1)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path != LLAMA_2_7B))
        for path in sorted(RECIPES.glob("llama*-trn1.toml"))
    ],
)
def test_no_collective_of_a_shipped_recipe_on_xla_is_above_the_limit(path: Path) -> None:
    """Trace one layer with the tables, because the other layers are equal."""
    traffic = trace_step(load_with(path, model__num_hidden_layers="1")).traffic

    for axis, of_axis in traffic.items():
        assert of_axis.largest_bytes <= MAX_COLLECTIVE_BYTES, axis
    assert max(of_axis.largest_bytes for of_axis in traffic.values()) > MAX_COLLECTIVE_BYTES / 2


def test_tables_and_activations_above_the_limit_are_sent_in_pieces() -> None:
    """A worker of 8 has 525 MB of float32 of a table as wide as Llama 3 70B's; 2 long sequences are 537 MB."""
    changed = {"model__hidden_size": "8192", "parallel__tensor_parallel_size": "8", "batch__micro_batch_size": "2"}
    traffic = trace_step(load_with(LLAMA_3_8B, model__num_hidden_layers="1", **changed)).traffic

    assert traffic["data"].largest_bytes <= MAX_COLLECTIVE_BYTES
    assert traffic["tensor"].largest_bytes <= MAX_COLLECTIVE_BYTES


def test_a_traced_step_sends_the_bytes_of_a_ring(tmp_path: Path) -> None:
    recipe = wide(tmp_path, model__num_hidden_layers="2", parallel__zero_stage="1", **SPLIT)
    trace = trace_step(recipe)

    # Key-value heads: 2, each held by 2 of the 4 workers.
    copies = (4 - 1) * 5 * 512 + (2 - 1) * 2 * 2 * 512 * 128
    assert 4 * trace.parameters == recipe.model.num_parameters + copies
    # Each worker passes 3/4 of the gradients on, and 3/4 of the weights; norms, losses and one number more are small.
    gradients = FLOAT32_BYTES * trace.parameters
    assert trace.traffic["data"].sent_bytes == pytest.approx(2 * gradients * 3 / 4, rel=0.01)
    # In each micro-batch each of 2 layers gathers and scatters [1, 512, 512] twice, forward and backward; the embedding
    # scatters and the loss gathers. Beside them the loss exchanges a few numbers for each token.
    activation = FLOAT32_BYTES * 512 * 512 * 3 / 4
    assert trace.traffic["tensor"].sent_bytes == pytest.approx(4 * (2 * 8 + 4) * activation, rel=0.02)
    assert not torch.distributed.is_initialized()
