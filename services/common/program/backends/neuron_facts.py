"""The facts that decide TorchNeuron's graphs and their bits, besides the program's source and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.hardware.image_platform import version_of
from services.common.program.backends.environment_facts import variables_of

CACHE_VARIABLE = "TORCH_NEURONX_NEFF_CACHE_DIR"
"""Variable that names the folder of compiled graphs."""
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
_GRAPH_VARIABLES = ("NEURON_CC_", "NEURON_COMPILER_", "NEURON_LOGICAL_NC_", "NEURON_PLATFORM_", "TORCH_NEURONX_")
_DISTRIBUTIONS = ("torch-neuronx", "neuronx-cc", "nki")


def compiler_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return by name the versions and the variables that decide TorchNeuron's graphs and their bits.

    The key of a graph in TorchNeuron's own cache lacks the compiler's version.
    """
    variables = variables_of(environment, _GRAPH_VARIABLES, without=(CACHE_VARIABLE,))
    return {"libraries": {name: version_of(name) for name in _DISTRIBUTIONS}, "neuron_environment": variables}
