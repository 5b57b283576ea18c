"""A deployment of the compiler for Neuron: pods with a device or without, as many as its tasks fill."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import RequestedRecipe, read_requested_recipe
from images.platforms import REPOSITORY
from k8s.client.compile_tasks import check_trace
from k8s.client.resolved_deployment import resolve
from k8s.objects.deployment import Deployment
from k8s.objects.worker_group import WorkerGroup, worker_group_of
from services.common.errors import RecipeError
from tests.k8s.builders import DIGEST
from tests.k8s.rendered import Thing, cluster_of

RECIPE = REPOSITORY / "recipes/llama2-7b-trn1.toml"
GIB = 2**30


ON_CPU = "--compile.trace_on=cpu"


@pytest.fixture
def compiler(compiler_on_cpus: list[Thing]) -> WorkerGroup:
    return worker_group_of(copy.deepcopy(cluster_of(compiler_on_cpus)), "compiler")


@pytest.fixture
def compiler_on_trainium(overlays: dict[str, list[Thing]]) -> WorkerGroup:
    return worker_group_of(copy.deepcopy(cluster_of(overlays["eks"])), "compiler")


def resolved(group: WorkerGroup, *arguments: str) -> tuple[Deployment, RequestedRecipe]:
    image = f"a/b@sha256:{DIGEST}"
    request = DeployRequest("compiler", read_requested_recipe(RECIPE), image, arguments=arguments)
    api: Any = None  # an image that has a digest is looked up nowhere
    return resolve(api, group, request)


@pytest.mark.parametrize(("tasks", "nodes"), [(1, 1), (3, 1), (4, 2), (8, 3)])
def test_there_are_as_many_pods_as_the_recipe_s_tasks_fill(compiler: WorkerGroup, tasks: int, nodes: int) -> None:
    arguments = (f"--compile.num_workers={tasks}",)
    deployment = resolved(compiler, *arguments)[0]

    assert (deployment.nodes, deployment.arguments) == (nodes, (*arguments, ON_CPU))


@pytest.mark.parametrize("tasks", [(), ("--compile.num_workers=8",)])
def test_the_recipe_s_nodes_decide_how_many_tasks_there_are(compiler: WorkerGroup, tasks: tuple[str, ...]) -> None:
    """No node is paid for that has no task, and no task is said to run that waits for a node."""
    arguments = (*tasks, "--cluster.compiler_nodes=2")
    found = resolved(compiler, *arguments)[0]

    assert (found.nodes, found.arguments) == (2, (*arguments, ON_CPU, "--compile.num_workers=6"))
    assert resolved(compiler, *found.arguments)[0].arguments == found.arguments


def test_a_task_that_fits_on_no_pod_is_refused_at_once(compiler: WorkerGroup) -> None:
    """Ray would wait for a node of its size for ever."""
    said = r"task_memory_gib = 128 .*compiler pods have 30 CPUs and 112 GiB"
    with pytest.raises(RecipeError, match=said):
        resolved(compiler, "--compile.task_memory_gib=128")


def test_where_graphs_are_traced_follows_the_pods(compiler: WorkerGroup, compiler_on_trainium: WorkerGroup) -> None:
    """COMPILER_POOL of the overlay's settings moves both."""
    (_, on_cpu), (deployment, on_device) = resolved(compiler), resolved(compiler_on_trainium)
    assert (on_cpu.outline.compile.trace_on, on_device.outline.compile.trace_on) == ("cpu", "device")
    assert check_trace(compiler, on_cpu.outline) == check_trace(compiler_on_trainium, on_device.outline) == ""
    assert ON_CPU not in deployment.arguments

    deployment, no_tasks = resolved(compiler, "--parallel.device=cpu")
    assert (deployment.arguments, check_trace(compiler, no_tasks.outline)) == (("--parallel.device=cpu",), "")


def test_a_trace_on_a_device_is_refused_where_the_compiler_has_none(compiler: WorkerGroup) -> None:
    said = check_trace(compiler, resolved(compiler, "--compile.trace_on=device")[1].outline)
    assert 'compile.trace_on is "device", but compiler pods have no aws.amazon.com/neuron' in said
    assert "COMPILER_POOL=trainium" in said
