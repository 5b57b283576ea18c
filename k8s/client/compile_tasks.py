"""The compiler's tasks, each of which compiles a graph for Neuron, and the pods that hold a few of them at a time."""

from __future__ import annotations

import math

from deploy.client.outline import Outline
from k8s.objects.names import NEURON
from k8s.objects.worker_group import WorkerGroup
from services.common.errors import RecipeError
from services.common.hardware.instance_types import GIB
from services.common.launch.launcher import TaskDemand

TASKS = "--compile.num_workers"


def tasks_of_a_pod(group: WorkerGroup, outline: Outline) -> int:
    """Tasks of the recipe that Ray runs on one pod at a time. Raises `RecipeError` where a pod holds none."""
    settings = outline.compile
    demand = TaskDemand(settings.task_cpus, int(settings.task_memory_gib * GIB))
    found = demand.count_on(float(group.ray_cpus), float(group.ray_memory_bytes))
    if found == 0:
        raise RecipeError(
            f"a task of compile.task_cpus = {settings.task_cpus} and compile.task_memory_gib = "
            f"{settings.task_memory_gib:g} would wait for ever: {group.name} pods have {group.ray_cpus:g} CPUs and "
            f"{group.ray_memory_bytes / GIB:,.0f} GiB. Lower it (ARGS=), or give the pods larger nodes (CPU_SHAPE in "
            f"the overlay's settings.env), then: make cluster-up"
        )
    return found


def pods_of(group: WorkerGroup, outline: Outline) -> int:
    """The fewest that hold all tasks which the recipe runs at a time."""
    return math.ceil(outline.compile.num_workers / tasks_of_a_pod(group, outline))


def place_of_trace(group: WorkerGroup, outline: Outline) -> str:
    """The option that lets a recipe which does not say where its graphs are traced follow the compiler's pods: empty
    where they have devices, as that is what such a recipe means.
    """
    if not outline.has_compile_tasks or "trace_on" in outline.compile.model_fields_set or NEURON in group.requests:
        return ""
    return "--compile.trace_on=cpu"


def check_trace(group: WorkerGroup, outline: Outline) -> str:
    """Has the compiler's group the devices on which the recipe's graphs are to be traced?"""
    is_on_device = outline.has_compile_tasks and outline.compile.trace_on == "device"
    if group.name != "compiler" or not is_on_device or NEURON in group.requests:
        return ""
    return (
        f'compile.trace_on is "device", and {group.name} pods have no {NEURON}: they take CPU nodes, so that no '
        f"Trainium node waits while graphs compile. Where a CPU traces the same graphs, leave compile.trace_on out of "
        f"recipe and ARGS: it follows the pods. Where it does not, put the compiler on Trainium nodes: "
        f"COMPILER_POOL=trainium in the overlay's settings.env, then: make cluster-up"
    )
