"""Measures what equal bits cost in attention on a GPU: a layer's, by the kernels that torch chooses with and without.

    python -m benchmarks.trainer.attention_row --recipe recipes/llama2-1b-cuda.toml

torch takes cuDNN's kernel first on some GPUs. If it must be deterministic, it takes none whose gradients differ from
run to run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from services.common.program.backends.backend import Collectives
from services.common.recipe.file import load_recipe

REPEATS = 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.attention_row")
    parser.add_argument("--recipe", type=Path, required=True, help="recipe of the shapes")
    recipe = load_recipe(parser.parse_args().recipe, {})
    model, batch = recipe.model, recipe.batch
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, one layer of {model.preset or recipe.name}")
    sizes = (batch.micro_batch_size, recipe.corpus.sequence_length, model.head_dim)
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        milliseconds = measure(*sizes, model.num_attention_heads, model.num_key_value_heads) * 1e3
        print(f"{'deterministic' if is_deterministic else 'any kernel':<16}{milliseconds:.2f} ms forward and backward")
    return 0


def measure(batch: int, length: int, head_dim: int, num_heads: int, num_kv_heads: int) -> float:
    """Return the mean seconds of causal attention and its gradients in bfloat16."""
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    gradient = torch.randn_like(q)
    started = 0.0
    for repeat in range(-5, REPEATS):  # the first five are not measured
        if repeat == 0:
            torch.cuda.synchronize()
            started = time.perf_counter()
        torch.autograd.grad(Collectives().attend(q, k, v, None), (q, k, v), gradient)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPEATS


if __name__ == "__main__":
    sys.exit(main())
