"""The devices of plain PyTorch, by their names in a recipe.

`cpu` is tested, and `cuda` on one H100. `neuron` follows the documentation of
TorchNeuron (native PyTorch on Trn2 and Trn3,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/torch-distributed.html). It has not run on its
device, and runs in tests on a stand-in (`services/common/testing/torch_neuron`).
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch

from services.common.errors import DeviceError
from services.common.hardware.gpus import describe_kinds
from services.common.program.backends.neuron_facts import compiler_facts, is_compile_only
from services.common.recipe.schema import Device, Recipe


@dataclass(frozen=True)
class NativeDevice:
    """Differences between the devices that `TorchNative` runs on."""

    collectives: str
    """Name of the torch.distributed backend of the process groups along the mesh's axes. The host's group is gloo."""
    forms_world: bool = False
    """Whether the first group of these collectives has to be that of all workers, whose rank and size the device's
    runtime then takes for its own."""
    has_all_to_all: bool = True
    """Whether the collectives have `all_to_all_single` with slices of any length."""
    compiler: Literal["inductor", "neuron"] = "inductor"
    """Compiler of `TorchNative.compile`."""
    visible_variable: str = ""
    """Environment variable that names those of the node's devices which a process sees."""
    library: str = ""
    """Library that registers the device and its collectives with torch when it is imported."""
    runs_eagerly: bool = True
    """See `Collectives.runs_eagerly`."""
    fused_adamw: Literal["never", "eager", "always"] = "never"
    """Whether torch's fused AdamW kernel replaces the program's own update: never, where that would not be compiled, or
    always."""


NATIVE_DEVICES: dict[Device, NativeDevice] = {
    "cpu": NativeDevice("gloo", fused_adamw="eager"),
    # The fused kernel updates all blocks in one launch, where compiled code is launched for each block.
    "cuda": NativeDevice("nccl", visible_variable="CUDA_VISIBLE_DEVICES", fused_adamw="always"),
    # TorchNeuron's fused AdamW ignores `found_inf`, and no bits of its other kernels have been seen.
    "neuron": NativeDevice(
        "neuron",
        forms_world=True,
        has_all_to_all=False,
        compiler="neuron",
        visible_variable="NEURON_RT_VISIBLE_CORES",
        library="torch_neuronx",
        runs_eagerly=False,
    ),
}

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Variable without which cuBLAS refuses to be deterministic, and the larger of the two values that NVIDIA allows for it
(https://docs.nvidia.com/cuda/cublas/#results-reproducibility)."""
GPU_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that change the bits of matrix products on a GPU."""


def open_device(name: Device, local_rank: int) -> torch.device:
    """Return the device of worker `local_rank` of the node, and hide the node's other GPUs from this process.

    So every worker's GPU has number 0. A graph contains that number, and workers with different numbers would compile
    different graphs. TorchNeuron gives a process the core of its LOCAL_RANK, and hides the others by itself: its device
    has no number here. Call this before anything else touches the device. Raises `DeviceError` where there is no device
    for this worker.
    """
    if name == "cpu":
        return torch.device("cpu")
    require_device(name)
    if name == "neuron":
        return torch.device(name)
    variable = NATIVE_DEVICES[name].visible_variable
    listed = os.environ.get(variable, ",".join(map(str, range(torch.get_device_module(name).device_count()))))
    visible = [each for each in listed.split(",") if each]
    if local_rank >= len(visible):
        raise DeviceError(
            f"worker {local_rank} of this node has no {name} device: this process sees {len(visible)} of them "
            f"({variable}={os.environ.get(variable, 'not set')}), and each worker needs one. Start fewer workers on a "
            f"node (cluster.trainer_workers_per_node, parallel.data_parallel_size), or list more devices in {variable}."
        )
    os.environ[variable] = visible[local_rank]
    if name == "cuda":
        os.environ.setdefault(*CUBLAS_WORKSPACE)
    return torch.device(name, 0)


def device_facts(recipe: Recipe) -> dict[str, Any]:
    """Return by name the facts of the recipe's device that decide graphs and bits. Inductor's facts describe a CPU.

    It opens no device. Raises `DeviceError` where there is no such device.
    """
    name = recipe.parallel.device
    if name == "cpu":
        return {}
    require_device(name, is_absence_fine=recipe.compile.trace_on == "cpu")
    if name == "cuda":
        variable, default = CUBLAS_WORKSPACE
        switches = {each: os.environ[each] for each in GPU_VARIABLES if each in os.environ}
        return {
            "device": describe_kinds(),
            "cuda": torch.version.cuda,
            "triton": version("triton"),
            # A worker sets the default when it opens its device; the command reads these facts before.
            "gpu_environment": switches | {variable: os.environ.get(variable, default)},
        }
    return compiler_facts(os.environ, recipe)


def require_device(name: Device, is_absence_fine: bool = False) -> None:
    """Raise `DeviceError` unless the installed torch knows the device and finds one.

    A library that compiles without its device needs none where `is_absence_fine`, or the environment says so.
    """
    native = NATIVE_DEVICES[name]
    library, compiles_alone = native.library, native.compiler == "neuron"
    try:
        if library:
            importlib.import_module(library)
        num_devices = torch.get_device_module(name).device_count()
    except (ImportError, RuntimeError, AttributeError) as error:
        raise DeviceError(
            f"parallel.device = {name!r}, and torch {torch.__version__} does not support that device ({error}). "
            f"Install a torch that does{f', and {library}' if library else ''}, or choose another device: "
            f"--parallel.device=cpu"
        ) from error
    if num_devices == 0 and not (compiles_alone and (is_absence_fine or is_compile_only(os.environ))):
        variable = native.visible_variable
        compiles = ", compile graphs without one: --compile.trace_on=cpu" if compiles_alone else ""
        raise DeviceError(
            f"parallel.device = {name!r}, and torch {torch.__version__} finds no such device on this machine "
            f"({variable}={os.environ.get(variable, 'not set')}). Run on a machine that has one and its driver"
            f"{compiles}, or choose another device: --parallel.device=cpu"
        )
