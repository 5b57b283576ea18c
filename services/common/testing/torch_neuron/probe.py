"""Tries on the stand-in what TorchNeuron refuses, and trains on the CPU and on the stand-in.

A process of its own, because a device cannot be removed from a process again.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.micro_batch import make_synthetic_micro_batch
from services.common.program.step import Program
from services.common.recipe.schema import Device
from services.common.testing.recipes import make_recipe
from services.common.testing.torch_neuron import attention
from services.common.testing.torch_neuron.device import NAME, device_module, forbidding_host_reads

STEPS = 3
_EAGER = {"compile__enabled": "false", "train__attention_mask": "block_causal", "train__z_loss": "1e-4"}


def main(folder: Path) -> None:
    importlib.import_module("torch_neuronx")
    print(json.dumps({"refused": _refused(), "steps": _train_on_both(folder), **_count_attentions(folder)}))


def _refused() -> list[str]:
    """Return the names of the operations that the device refuses."""
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
    refused = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except RuntimeError:  # torch itself refuses tensors of two devices
            refused.append(name)
    return refused


def _train_on_both(folder: Path) -> dict[str, Any]:
    """Train STEPS steps on the CPU and on the device, and return the losses and the device's operations."""
    recipe = make_recipe(folder, **_EAGER)
    micro_batches = [make_synthetic_micro_batch(recipe)] * recipe.batch.num_micro_batches

    def losses(name: Device) -> list[float]:
        backend = TorchNative(Mesh(0, data_parallel_size=1), 1, "exact", name)
        program, found = Program(recipe, backend), []
        for step in range(STEPS):
            with forbidding_host_reads():
                result = program.train_step(step, micro_batches)
            found.append(result.loss.item())
        return [*found, program.evaluate(micro_batches[0]).sum().item()]

    on_cpu = losses("cpu")
    before = device_module().operations.total()
    return {"cpu": on_cpu, NAME: losses("neuron"), "operations": device_module().operations.total() - before}


def _count_attentions(folder: Path) -> dict[str, int]:
    """Train a step whose backward pass recomputes all but slow operations, and return how often attention ran."""
    recipe = make_recipe(folder, compile__enabled="false", train__activation_checkpointing="selective")
    program = Program(recipe, TorchNative(Mesh(0, data_parallel_size=1), 1, "exact", "neuron"))
    before = device_module().operations[attention.COUNTED]
    program.train_step(0, [make_synthetic_micro_batch(recipe)] * recipe.batch.num_micro_batches)
    layers_and_batches = recipe.model.num_hidden_layers * recipe.batch.num_micro_batches
    return {"attentions": device_module().operations[attention.COUNTED] - before, "layers": layers_and_batches}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
