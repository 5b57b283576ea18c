"""Checks of the environment variables that torch_xla and neuronx-cc read, made before there is a graph.

A cache serves a run only where both were made with the same variables and compiler flags. So a variable that changes
graphs has one value, and flags come from the recipe.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import DeviceError
from services.common.hardware.image_platform import neuron_chips, version_of
from services.common.hardware.instance_types import family_of
from services.common.program.backends import neuron_distributed
from services.common.program.backends.environment_facts import require_flags, variables_of
from services.common.program.buckets import choose_num_blocks
from services.common.recipe.schema import Recipe

CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
PJRT_VARIABLE = "PJRT_DEVICE"
NEURON, CPU = "NEURON", "CPU"
PINNED_VARIABLES = {
    "XLA_IR_DEBUG": "0",  # this one and the next write paths of source files into graphs
    "XLA_HLO_DEBUG": "0",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",  # 1 gives graphs other hashes, and a gap in convergence with ZeRO-1
    # Without it the graph of a worker that is traced alone would lack its all-reduces.
    "XLA_ALWAYS_ALLREDUCE": "1",
}
"""Variables that change graphs, with the one value that each may have. torch_xla reads them when it is imported."""
FORBIDDEN_VARIABLES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Variables that make torch_xla round float32 to bfloat16. Any value is refused: NxD's attention reads them too, and
keeps the sums of its softmax in bfloat16 even where they are 0."""
_GRAPH_VARIABLES = (
    "XLA_",
    "NEURON_FUSE_",
    "NEURON_CUSTOM_",
    "NEURON_LOGICAL_NC_",
    "NEURON_PLATFORM_",
    "NEURON_RT_STOCH",
)
_DISTRIBUTIONS = ("torch_xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "neuronx_distributed", "nki")


def xla_facts(recipe: Recipe) -> dict[str, Any]:
    """Return by name what decides the recipe's graphs and their bits on torch_xla, without importing it.

    Raises `DeviceError` where torch_xla is absent, or a variable is set against the recipe.
    """
    require_pinned(os.environ)
    require_flags(os.environ, FLAGS_VARIABLE, compiler_flags(recipe))
    if importlib.util.find_spec("torch_xla") is None:
        raise torch_xla_is_absent("it is not installed")
    data_parallel_size = recipe.parallel.data_parallel_size
    return {
        "libraries": {name: version_of(name) for name in _DISTRIBUTIONS},
        "pjrt_device": pjrt_device(os.environ),
        # An update is one graph, which lists the ranks that sum together, and contains the shapes of its blocks.
        "data_parallel_size": data_parallel_size,
        "zero_stage": recipe.parallel.zero_stage,
        "blocks": choose_num_blocks(recipe.batch.num_micro_batches, data_parallel_size),
        "compiler_flags": list(compiler_flags(recipe)),
        "flash_attention": why_without_nxd(os.environ) or "NxD's, of sequences that it takes",
        "environment": {**PINNED_VARIABLES, **variables_of(os.environ, _GRAPH_VARIABLES)},
    }


def require_pinned(environment: Mapping[str, str]) -> None:
    """Raise `DeviceError` where a variable would make graphs that no cache holds, or rounds float32 to bfloat16."""
    for name, pinned in PINNED_VARIABLES.items():
        if environment.get(name, pinned) != pinned:
            raise DeviceError(
                f"{name}={environment[name]} is set, and graphs are made with {name}={pinned}: another value makes "
                f"graphs that no cache holds. Unset it: unset {name}"
            )
    for name in FORBIDDEN_VARIABLES:
        if name in environment:
            raise DeviceError(
                f"{name}={environment[name]} is set, and would round float32 to bfloat16. The recipe decides the types "
                f"(train.dtype, train.param_dtype). Unset it: unset {name}"
            )


def compiler_flags(recipe: Recipe) -> tuple[str, ...]:
    """Return the flags of neuronx-cc. Their target is the family of the trainer's instances, on any node."""
    return (f"--target={family_of(recipe.cluster.trainer_instance_type)}", *recipe.compile.flags)


def pjrt_device(environment: Mapping[str, str]) -> str:
    """Return the device that torch_xla opens: NEURON, or CPU where PJRT_DEVICE says so.

    Raises `DeviceError` where PJRT_DEVICE names another device.
    """
    device = environment.get(PJRT_VARIABLE, NEURON)
    if device not in (NEURON, CPU):
        raise DeviceError(
            f"{PJRT_VARIABLE}={device} is set, and parallel.device = 'xla' runs on a NeuronCore, or on torch_xla's CPU "
            f"device with {PJRT_VARIABLE}={CPU}. Unset it: unset {PJRT_VARIABLE}"
        )
    return device


def require_runtime(environment: Mapping[str, str]) -> None:
    """Raise `DeviceError` where this node has no NeuronCore, on which torch_xla would compute on the CPU, for weeks."""
    if pjrt_device(environment) == CPU:
        return
    missing = []
    if importlib.util.find_spec("libneuronxla") is None:
        missing.append("libneuronxla, which the neuron images have (make images VARIANT=neuron)")
    if not neuron_chips():
        missing.append("a Neuron device, /dev/neuron0 and on (a trn1 node shows them to pods that ask for them)")
    if missing:
        raise DeviceError(
            f"parallel.device = 'xla', and this node lacks {' and '.join(missing)}. torch_xla would compute on the "
            f"host instead. Run on a Trainium node in a neuron image; for a trial on the host, of one worker, set "
            f"{PJRT_VARIABLE}={CPU}"
        )


def why_without_nxd(environment: Mapping[str, str]) -> str:
    """Return why NxD's kernels and groups are not used here; empty where they are. A trace and its run agree on it."""
    if pjrt_device(environment) == CPU:
        return f"{PJRT_VARIABLE}={CPU}, and NxD's kernels are for NeuronCores"
    return "" if neuron_distributed.is_installed() else "neuronx_distributed is not installed"


def torch_xla_is_absent(reason: str) -> DeviceError:
    """Return the error of a node on which torch_xla cannot be imported."""
    return DeviceError(
        f"parallel.device = 'xla', and torch_xla cannot be imported ({reason}). The neuron images have it: build them "
        f"with `make images VARIANT=neuron` and run the stage in its own, or choose another device: "
        f"--parallel.device=cpu"
    )


def count_modules() -> int:
    """Return the number of graphs in this process's compile cache."""
    folder = os.environ.get(CACHE_VARIABLE, "")
    return sum(path.is_dir() for path in Path(folder).glob("neuronxcc-*/MODULE_*")) if folder else 0
