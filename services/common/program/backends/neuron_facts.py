"""The facts that decide TorchNeuron's graphs and their bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import DeviceError
from services.common.hardware.image_platform import version_of
from services.common.hardware.instance_types import TRN1, family_of, read_instance_types
from services.common.program.backends.environment_facts import require_flags, variables_of
from services.common.recipe.schema import Recipe

CACHE_VARIABLE = "TORCH_NEURONX_NEFF_CACHE_DIR"
"""Variable that names the folder of compiled graphs."""
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
COMPILE_ONLY_VARIABLE = "TORCH_NEURONX_COMPILE_ONLY"
"""Variable with which TorchNeuron compiles graphs and runs none, so that it needs no device."""
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Variable that names the family of instances for which graphs are compiled, where no device tells it."""
CORE_SIZE_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
"""Variable with the number of physical cores of a logical one, which the launcher sets for workers."""
_GRAPH_VARIABLES = ("NEURON_CC_", "NEURON_COMPILER_", "NEURON_LOGICAL_NC_", "NEURON_PLATFORM_", "TORCH_NEURONX_")
# These say where graphs are kept and compiled, or what the recipe says: workers and traces get them, and the command's
# own environment has none of them.
_NEUTRAL_VARIABLES = frozenset(
    {CACHE_VARIABLE, COMPILE_ONLY_VARIABLE, CORE_SIZE_VARIABLE, FLAGS_VARIABLE, TARGET_VARIABLE}
)
_DISTRIBUTIONS = ("torch-neuronx", "neuronx-cc", "nki")


def compiler_facts(environment: Mapping[str, str], recipe: Recipe) -> dict[str, Any]:
    """Return by name the versions and the variables that decide TorchNeuron's graphs and their bits.

    The key of a graph in TorchNeuron's own cache lacks the compiler's version. Raises `DeviceError` where a variable
    names another target or other flags than the recipe.
    """
    require_flags(environment, FLAGS_VARIABLE, recipe.compile.flags)
    instance_type, parallel, of_device = recipe.cluster.trainer_instance_type, recipe.parallel, "that of the device"
    target = _target_of(instance_type) if instance_type else environment.get(TARGET_VARIABLE, of_device)
    core_size = _core_size(recipe) or environment.get(CORE_SIZE_VARIABLE, of_device)
    if environment.get(TARGET_VARIABLE, target) != target:
        raise DeviceError(
            f"{TARGET_VARIABLE}={environment[TARGET_VARIABLE]} is set, and cluster.trainer_instance_type is "
            f"{instance_type}, whose target is {target}. Unset it: unset {TARGET_VARIABLE}"
        )
    facts: dict[str, Any] = {
        "device": parallel.device,
        "target": target,
        "logical_core_size": core_size,
        "libraries": {name: version_of(name) for name in _DISTRIBUTIONS},
        "neuron_environment": variables_of(environment, _GRAPH_VARIABLES, without=_NEUTRAL_VARIABLES),
    }
    if recipe.compile.enabled and parallel.tensor_parallel_size > 1:
        # Collectives in a graph list the ranks of one model, or of all models.
        facts["data_parallel_size"] = parallel.data_parallel_size
    return facts


def cache_variables(folder: Path, recipe: Recipe) -> dict[str, str]:
    """Return the variables with which a process keeps its graphs in `folder`, and compiles with the recipe's flags."""
    flags = {FLAGS_VARIABLE: " ".join(recipe.compile.flags)} if recipe.compile.flags else {}
    return {CACHE_VARIABLE: str(folder)} | flags


def trace_variables(recipe: Recipe) -> dict[str, str]:
    """Return the variables with which a process compiles the recipe's graphs: the size of the trainer's cores, and with
    `compile.trace_on = "cpu"` what lets it compile without a device.

    Raises `DeviceError` where the recipe does not say for which instances.
    """
    instance_type = recipe.cluster.trainer_instance_type
    core_size = _core_size(recipe)
    variables = {CORE_SIZE_VARIABLE: core_size} if core_size else {}
    if recipe.compile.trace_on == "device":
        return variables
    if instance_type is None:
        raise DeviceError(
            "compile.trace_on = 'cpu', and no device tells for which instances graphs are compiled. Name the "
            "trainer's: --cluster.trainer_instance_type=trn2.48xlarge, or compile on its node: "
            "--compile.trace_on=device"
        )
    return variables | {COMPILE_ONLY_VARIABLE: "1", TARGET_VARIABLE: _target_of(instance_type)}


def is_compile_only(environment: Mapping[str, str]) -> bool:
    """Whether TorchNeuron compiles graphs in this process and runs none."""
    return environment.get(COMPILE_ONLY_VARIABLE) == "1"


def _core_size(recipe: Recipe) -> str:
    """Return the number of physical cores of a worker's logical one; empty where the recipe names no instances."""
    instance_type, on_node = recipe.cluster.trainer_instance_type, recipe.cluster.trainer_workers_per_node
    size = read_instance_types()[instance_type].divided_for(on_node).logical_core_size if instance_type else None
    return "" if size is None else str(size)


def _target_of(instance_type: str) -> str:
    """Return neuronx-cc's target for the instances: trn2 for trn2u too."""
    return family_of(instance_type)[: len(TRN1)]
