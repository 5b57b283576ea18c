"""Checks one node's NeuronCores: whether the chips that the driver lists have one for each worker."""

from __future__ import annotations

from services.common.errors import DeviceError
from services.common.hardware.image_platform import NEURON_DEVICES, neuron_chips
from services.common.recipe.schema import Recipe
from services.trainer.inspection.findings import Finding, ok, problem, warning
from services.trainer.inspection.fit import instance_type


def look_at_neuron_cores(recipe: Recipe, workers: int) -> Finding:
    """Check that the node's chips have a logical NeuronCore for each of its `workers`.

    The driver lists chips alone, so the cores of a chip are those of the recipe's instance type.
    """
    check, chips, node = "NeuronCores", len(neuron_chips()), instance_type(recipe)
    seen = f"{chips} chips in {NEURON_DEVICES}, {workers} workers take a logical core each"
    if not chips:
        return warning(
            check,
            f"{seen}: the library that computes here is a stand-in, or the container has no devices",
            f"start the container with --device={NEURON_DEVICES}/neuron0 ... and look at neuron-ls",
        )
    if node is None:
        return ok(check, f"{seen}; how many there are is unknown: the recipe has no cluster.trainer_instance_type")
    of_chip = node.workers // node.chips
    size = f", each of {node.logical_core_size} physical" if node.logical_core_size else ""
    seen = f"{seen}; a chip of {node.name} has {of_chip}{size}"
    if chips * of_chip < workers:
        return problem(
            check,
            DeviceError(f"{seen}, so {workers - chips * of_chip} workers would have none"),
            f"--cluster.trainer_workers_per_node={chips * of_chip}, or a container with all devices of the node",
        )
    return ok(check, seen)
