"""Places the compiler's tasks on pods. A task compiles one graph for Neuron; a pod runs several tasks at a time."""

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
    """Number of the recipe's tasks that Ray runs on one pod at a time. Raises `RecipeError` where it is 0."""
    settings = outline.compile
    demand = TaskDemand(settings.task_cpus, int(settings.task_memory_gib * GIB))
    found = demand.count_on(float(group.ray_cpus), float(group.ray_memory_bytes))
    if found == 0:
        raise RecipeError(
            f"a task of compile.task_cpus = {settings.task_cpus} and compile.task_memory_gib = "
            f"{settings.task_memory_gib:g} would never start: {group.name} pods have {group.ray_cpus:g} CPUs and "
            f"{group.ray_memory_bytes / GIB:,.0f} GiB. Lower these keys (ARGS=), or use larger nodes (CPU_SHAPE in "
            f"the overlay's settings.env), then: make cluster-up"
        )
    return found


def pods_of(group: WorkerGroup, outline: Outline) -> int:
    """Smallest number of pods on which all of the recipe's concurrent tasks run."""
    return math.ceil(outline.compile.num_workers / tasks_of_a_pod(group, outline))


def choose_trace_option(group: WorkerGroup, outline: Outline) -> str:
    """The option with which graphs are traced on a CPU, for pods without devices and a recipe without
    `compile.trace_on`; else empty, which traces on the device.
    """
    if not outline.has_compile_tasks or "trace_on" in outline.compile.model_fields_set or NEURON in group.requests:
        return ""
    return "--compile.trace_on=cpu"


def check_trace(group: WorkerGroup, outline: Outline) -> str:
    """The reason why the recipe's graphs cannot be traced on the compiler's pods; empty where they can."""
    is_on_device = outline.has_compile_tasks and outline.compile.trace_on == "device"
    if group.name != "compiler" or not is_on_device or NEURON in group.requests:
        return ""
    return (
        f'compile.trace_on is "device", but {group.name} pods have no {NEURON}. If a CPU traces the same graphs, '
        f"remove compile.trace_on from recipe and ARGS. Otherwise move the compiler to Trainium nodes: "
        f"COMPILER_POOL=trainium in the overlay's settings.env, then: make cluster-up"
    )
