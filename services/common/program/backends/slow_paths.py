"""Finds settings of recipes that keep a step from the fast kernels of its device. It needs no torch and no device."""

from __future__ import annotations

from collections.abc import Callable

from services.common.program.backends import neuron_facts
from services.common.recipe.schema import Device, Recipe

_OF_DEVICE: dict[Device, Callable[[Recipe], dict[str, str]]] = {"neuron": neuron_facts.slow_paths}


def slow_paths(recipe: Recipe) -> dict[str, str]:
    """Return a sentence for each part of the recipe's step that runs by a slow kernel of its device, by its name."""
    find = _OF_DEVICE.get(recipe.parallel.device)
    return find(recipe) if find else {}
