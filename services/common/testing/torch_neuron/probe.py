"""Tries on the stand-in what TorchNeuron refuses, prints the reasons, and trains on the CPU and on the stand-in.

A process of its own, because a device cannot be removed from a process again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.micro_batch import make_synthetic_micro_batch
from services.common.program.step import Program
from services.common.recipe.schema import Device
from services.common.testing.recipes import make_recipe
from services.common.testing.torch_neuron import attention, collectives
from services.common.testing.torch_neuron.device import NAME, device_module, forbidding_host_reads

STEPS = 3
_EAGER = {"compile__enabled": "false", "train__attention_mask": "block_causal", "train__z_loss": "1e-4"}


def main(folder: Path) -> None:
    importlib.import_module("torch_neuronx")
    print(json.dumps({"refusals": _refusals(folder), "steps": _train_on_both(folder), **_count_attentions(folder)}))


def _refusals(folder: Path) -> dict[str, str]:
    """Return why each operation is refused; an empty reason for one that is not."""
    x = torch.ones(4, device=NAME)
    store = dist.FileStore(str(folder / "store"), 1)  # type: ignore[attr-defined]

    def read_in_step() -> None:
        with forbidding_host_reads():
            x.sum().item()

    def compile_dynamic() -> None:
        torch.compile(torch.square, backend=NAME, dynamic=True, fullgraph=True)(x)

    def compile_unknown_group() -> None:
        def sum_up(x: Tensor) -> Tensor:
            return torch.ops._c10d_functional.all_reduce(x, "sum", "nobody")

        torch.compile(sum_up, backend=NAME, dynamic=False, fullgraph=True)(x)

    def update_fused() -> None:
        steps, settings = [torch.ones((), device=NAME)], {"weight_decay": 0.0, "eps": 1.0, "amsgrad": False}
        fused: Any = torch._fused_adamw_
        fused([x], [x], [x], [x], [], steps, lr=0.1, beta1=0.9, beta2=0.9, maximize=False, **settings)

    def form_subgroup() -> None:
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "0")
        os.environ |= {"WORLD_SIZE": "4", "NEURON_RT_ROOT_COMM_ID": "127.0.0.1:1"}
        collectives._form_group(store, 0, 2, timedelta(seconds=1))

    def exchange_slices() -> None:
        os.environ["WORLD_SIZE"] = "1"
        group = collectives._form_group(dist.FileStore(str(folder / "own"), 1), 0, 1, timedelta(seconds=1))  # type: ignore[attr-defined]
        group.alltoall_base(torch.empty_like(x), x, [4], [4])

    attempts: dict[str, Callable[[], Any]] = {
        "a tensor of the host": lambda: x + torch.ones(4),
        "float64": x.double,
        "large int64": lambda: torch.tensor([2**40]).to(NAME),
        "a shape that depends on values": x.nonzero,
        "fused AdamW": update_fused,
        "another worker's device": lambda: torch.ones(4, device=f"{NAME}:7"),
        "a read by the host in a step": read_in_step,
        "dynamic shapes": compile_dynamic,
        "a graph with a group that is not there": compile_unknown_group,
        "random numbers": x.normal_,
        "an operation that may run on the host": x.erfinv,
        "a first group of some workers": form_subgroup,
        "slices of one tensor for each worker": exchange_slices,
    }
    return {name: _reason(attempt) for name, attempt in attempts.items()}


def _reason(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except RuntimeError as error:  # torch itself refuses tensors of two devices
        return str(error)
    return ""


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
