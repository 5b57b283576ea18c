"""The devices that plain PyTorch runs the program on, by the recipe's names for them.

`cpu` is tested. `cuda` follows torch's documentation, and `neuron` that of TorchNeuron (native PyTorch on Trn2 and
Trn3, https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/torch-distributed.html): neither has run.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from services.common.errors import DeviceError
from services.common.nvidia_smi import describe_kinds
from services.common.recipe import Device


@dataclass(frozen=True)
class NativeDevice:
    collectives: str
    """Backend of the process groups along the axes of the mesh. On the host workers talk over gloo, whatever theirs."""
    visible_variable: str = ""
    """Says which of the node's devices a process sees."""
    library: str = ""
    """Registers the device and its collectives with torch when it is imported."""


NATIVE_DEVICES: dict[Device, NativeDevice] = {
    "cpu": NativeDevice("gloo"),
    "cuda": NativeDevice("nccl", "CUDA_VISIBLE_DEVICES"),
    "neuron": NativeDevice("neuron", "NEURON_RT_VISIBLE_CORES", "torch_neuronx"),
}


CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Variable without which cuBLAS refuses to be deterministic, and the larger of the two values that NVIDIA allows for it
(https://docs.nvidia.com/cuda/cublas/#results-reproducibility)."""
GPU_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that change the bits of matrix products on a GPU."""


def open_device(name: Device, local_rank: int) -> torch.device:
    """The worker's own device: that of its index among the workers of its node.

    It sees no other, and calls it number 0: a graph holds the number, and workers would compile one each. So this comes
    before anything else that touches the device. Raises `DeviceError` where there is none for this worker.
    """
    if name == "cpu":
        return torch.device("cpu")
    require_device(name)
    variable = NATIVE_DEVICES[name].visible_variable
    visible = _visible_devices(variable, torch.get_device_module(name).device_count())
    if local_rank >= len(visible):
        raise DeviceError(
            f"worker {local_rank} of this node has no {name} device: {len(visible)} can be seen "
            f"({variable}={os.environ.get(variable, 'not set')}), and each worker takes one. Start fewer workers on a "
            f"node (cluster.trainer_workers_per_node, parallel.data_parallel_size), or let the command see more."
        )
    os.environ[variable] = visible[local_rank]
    if name == "cuda":
        os.environ.setdefault(*CUBLAS_WORKSPACE)
    return torch.device(name, 0)


def device_facts(name: Device, is_compiled: bool) -> dict[str, Any]:
    """What decides a graph and its bits on the device, by name; nothing for a CPU, of which Inductor's facts tell.

    Does not open the device. Raises `DeviceError` where there is none, or where none of its compilers is used here.
    """
    if name == "cpu":
        return {}
    require_device(name)
    if name == "cuda":
        variable, default = CUBLAS_WORKSPACE
        switches = {each: os.environ[each] for each in GPU_VARIABLES if each in os.environ}
        return {
            "device": describe_kinds(),
            "cuda": torch.version.cuda,
            "triton": version("triton"),
            # The default is set when a worker opens its device, and the command asks before.
            "gpu_environment": switches | {variable: os.environ.get(variable, default)},
        }
    if is_compiled:
        raise DeviceError(
            "parallel.device = 'neuron' runs operation by operation: TorchNeuron has a compiler of its own, which this "
            "backend does not call. Run without compiled graphs: --compile.enabled=false"
        )
    return {"device": name, NATIVE_DEVICES[name].library: version("torch-neuronx")}


def require_device(name: Device) -> None:
    """Raise `DeviceError` unless torch here knows the device and finds one."""
    library = NATIVE_DEVICES[name].library
    try:
        if library:
            importlib.import_module(library)
        num_devices = torch.get_device_module(name).device_count()
    except (ImportError, RuntimeError, AttributeError) as error:
        raise DeviceError(
            f"parallel.device = {name!r}, and torch {torch.__version__} has no such device ({error}). Install a torch "
            f"that has it{f' with {library}' if library else ''}, or choose another: --parallel.device=cpu"
        ) from error
    if num_devices == 0:
        variable = NATIVE_DEVICES[name].visible_variable
        raise DeviceError(
            f"parallel.device = {name!r}, and torch {torch.__version__} finds none here "
            f"({variable}={os.environ.get(variable, 'not set')}). Run on a machine that has one, with its driver, or "
            f"choose another: --parallel.device=cpu"
        )


def _visible_devices(variable: str, num_devices: int) -> list[str]:
    """Names of the devices that the process may use: numbers, ranges of them, or a vendor's ids."""
    if variable not in os.environ:
        return [str(number) for number in range(num_devices)]
    visible: list[str] = []
    for name in filter(None, os.environ[variable].split(",")):
        first, dash, last = name.partition("-")
        is_range = dash and re.fullmatch(r"\d+", first) and re.fullmatch(r"\d+", last)
        visible += [str(number) for number in range(int(first), int(last) + 1)] if is_range else [name]
    return visible
