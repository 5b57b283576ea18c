"""Tries on the stand-in what TorchNeuron refuses, and trains on it.

A process of its own, because a device cannot be removed from a process again.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.micro_batch import make_synthetic_micro_batch
from services.common.program.step import Program
from services.common.testing.recipes import make_recipe
from services.common.testing.torch_neuron import attention
from services.common.testing.torch_neuron.device import NAME, device_module, forbidding_host_reads

STEPS = 3
_EAGER = {
    "compile__enabled": "false",
    "train__attention_mask": "block_causal",
    "train__z_loss": "1e-4",
    "train__activation_checkpointing": "selective",
}


def main(folder: Path) -> None:
    importlib.import_module("torch_neuronx")
    print(json.dumps({"taken": _try_operations(), **_train(folder)}))


def _try_operations() -> list[str]:
    """Return the names of those of the operations that the device takes."""
    x = torch.ones(4, device=NAME)

    def read_in_step() -> None:
        with forbidding_host_reads():
            x.sum().item()

    attempts: dict[str, Callable[[], Any]] = {
        "a tensor of the host": lambda: x + torch.ones(4),
        "float64": x.double,
        "large int64": lambda: torch.tensor([2**40]).to(NAME),
        "a shape that depends on values": x.nonzero,
        "another worker's device": lambda: torch.ones(4, device=f"{NAME}:7"),
        "a read by the host in a step": read_in_step,
        "dynamic shapes": lambda: torch.compile(torch.square, backend=NAME, dynamic=True, fullgraph=True)(x),
        "random numbers": x.normal_,
        "an operation that may run on the host": x.erfinv,
        "an addition": lambda: x + x,
    }
    taken = []
    for name, attempt in attempts.items():
        with suppress(RuntimeError):  # torch itself refuses tensors of two devices
            attempt()
            taken.append(name)
    return taken


def _train(folder: Path) -> dict[str, int]:
    """Train steps in which the host reads nothing; returns how often attention ran, and how often layers did."""
    recipe = make_recipe(folder, **_EAGER)
    micro_batches = [make_synthetic_micro_batch(recipe)] * recipe.batch.num_micro_batches
    program = Program(recipe, TorchNative(Mesh(0, data_parallel_size=1), 1, "exact", "neuron"))
    with forbidding_host_reads():
        for step in range(STEPS):
            program.train_step(step, micro_batches)
    layers = recipe.model.num_hidden_layers * len(micro_batches) * STEPS
    return {"attentions": device_module().operations[attention.COUNTED], "layers": layers}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
