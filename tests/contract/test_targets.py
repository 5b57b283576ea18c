"""A stage's container is the same on both targets: in the worker group of a RayJob, and in a job definition of AWS
Batch.
"""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.utils.quantity import parse_quantity

from deploy.batch.config import Config
from deploy.batch.job_definition import Request, queue_of, read_container, render_job_definition
from deploy.batch.resolved_job import resolve_job
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from deploy.exit_codes import is_tried_again
from deploy.stage_contract import DRAIN_VARIABLES, RAY_ENVIRONMENT, ROOT, SCRATCH, find_contract
from images.platforms import REPOSITORY
from images.registry import repository_of
from k8s.client.overlay import render
from k8s.client.resolved_deployment import resolve
from k8s.objects.attempt import render_rayjob
from k8s.objects.worker_group import WorkerGroup, worker_group_of
from services.common.artifacts.store import artifact_id
from services.common.process.shutdown import DRAIN_TIMEOUT_VARIABLE
from services.common.recipe.file import read_overrides
from services.common.recipe.packed_recipe import RECIPE_VARIABLE
from services.common.recipe.schema import STAGES, WEBHOOK_VARIABLE, Recipe, Stage
from tests.deploy.batch.builders import config_of, job_spec_of
from tests.k8s.builders import DIGEST, deployment_of
from tests.k8s.rendered import OVERLAYS, cluster_of, copy_overlay

Thing = dict[str, Any]
SHAPES = ("trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge")
GIB, MIB = 2**30, 2**20
RECIPE = read_requested_recipe(REPOSITORY / "recipes/llama2-7b-trn1.toml")
IMAGE = f"a/b@sha256:{DIGEST}"
REGISTRY = "111122223333.dkr.ecr.us-west-2.amazonaws.com"


@pytest.fixture(scope="module")
def manifests(kubectl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Thing]:
    """The RayCluster of an overlay in AWS, by the shape of its Trainium nodes."""
    settings = {"REGION": "us-west-2", "REGISTRY": REGISTRY}

    def cluster_on(shape: str) -> Thing:
        folder = tmp_path_factory.mktemp(shape)
        return cluster_of(render(copy_overlay(OVERLAYS["eks"], folder, **settings, TRAINIUM_SHAPE=shape)))

    return {shape: cluster_on(shape) for shape in SHAPES}


def group_of(manifests: dict[str, Thing], stage: Stage, shape: str) -> WorkerGroup:
    return worker_group_of(manifests[shape], stage)


def definition_of(stage: Stage, config: Config) -> Request:
    pool = queue_of(config, stage, is_compiler_on_trainium=True)  # as the overlay has it
    return render_job_definition(config, pool, job_spec_of(stage))


def on_kuberay(group: WorkerGroup) -> Thing:
    """Return the settings of the container in a worker group's pod, with the command of its RayJob."""
    deployment = deployment_of(group.name, arguments=("--train.max_steps=5",), drain_seconds=0)
    container, pod = group.container, group.pod
    command = shlex.split(render_rayjob(group, deployment, 1, deployment.nodes)["spec"]["entrypoint"])
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    shared = [volumes[each["name"]]["emptyDir"].get("sizeLimit") for each in mounts.values() if each["name"] == "shm"]
    requests = container["resources"]["requests"]
    return {
        "image": repository_of(group.image),
        "command": _without_recipe(command[1:]),  # after `exec`, for Ray's shell
        "cpus": int(requests["cpu"]),
        "memory": parse_quantity(requests["memory"]),
        "shared memory": sum(map(parse_quantity, shared)),
        "devices": (int(requests.get("aws.amazon.com/neuron", 0)), int(requests.get("vpc.amazonaws.com/efa", 0))),
        "Ray's NeuronCores": int(group.spec["resources"].get("neuron_cores", 0)),
        "Ray's CPUs": int(group.spec["resources"]["CPU"]),
        "mounts": {
            path: each.get("readOnly", False) for path, each in mounts.items() if path in (ROOT.path, SCRATCH.path)
        },
        "environment": {each["name"]: each["value"] for each in container["env"] if "value" in each},
        "secrets": {each["name"] for each in container["env"] if "valueFrom" in each},
        "tried again": {code for code in range(256) if is_tried_again(code)},
        "is privileged": container["securityContext"].get("privileged", False),
    }


def on_batch(definition: Request) -> Thing:
    """Return the settings of the container on a job's nodes."""
    container = read_container(definition)
    command = container["command"]
    at = command.index("--")
    options = dict(zip(command[1:at:2], command[2:at:2], strict=True))
    linux = container["linuxParameters"]
    devices = [each["containerPath"] for each in linux.get("devices", [])]
    amounts = {each["type"]: int(each["value"]) for each in container["resourceRequirements"]}
    environment = {each["name"]: each["value"] for each in container["environment"]}
    environment.pop(RECIPE_VARIABLE, None)  # on KubeRay it is a ConfigMap
    rules = definition["retryStrategy"]["evaluateOnExit"]
    return {
        "image": repository_of(container["image"]),
        "command": _without_recipe(command[at + 1 :]),
        "cpus": amounts["VCPU"],
        "memory": amounts["MEMORY"] * MIB,
        "shared memory": linux.get("sharedMemorySize", 0) * MIB,
        "devices": tuple(sum(kind in each for each in devices) for kind in ("/neuron", "/uverbs")),
        "Ray's NeuronCores": int(options.get("--neuron-cores", 0)),
        "Ray's CPUs": int(options["--cpus"]),
        "mounts": {each["containerPath"]: each["readOnly"] for each in container["mountPoints"]},
        "environment": environment,
        # On KubeRay the deploy Job has the webhook, and sends the notices of its stage.
        "secrets": {each["name"] for each in container.get("secrets", [])} - {WEBHOOK_VARIABLE},
        "tried again": {code for code in range(256) if _action(rules, code) == "RETRY"},
        "is privileged": container["privileged"],
    }


def _without_recipe(command: list[str]) -> list[str]:
    """Replace the recipe's path, the only word that differs: a mounted ConfigMap, or a file below the root."""
    at = command.index("--recipe") + 1
    return [*command[:at], "RECIPE", *command[at + 1 :]]


def _action(rules: list[Request], exit_code: int) -> str:
    """Return Batch's action for a container's exit code: that of the first matching rule, else RETRY."""
    said = [each["action"] for each in rules if fnmatchcase(str(exit_code), each.get("onExitCode", "none"))]
    return str(said[0]) if said else "RETRY"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_gets_the_same_on_both_targets(manifests: dict[str, Thing], stage: Stage, shape: str) -> None:
    group = group_of(manifests, stage, shape)
    assert on_kuberay(group) == on_batch(definition_of(stage, config_of(TRAINIUM_SHAPE=shape)))


@pytest.mark.parametrize("target", ["kuberay", "batch"])
def test_the_compiler_compiles_the_graphs_of_the_trainer_on_as_many_nodes(
    manifests: dict[str, Thing], target: str
) -> None:
    """NODES=2 of both stages; the compiler's own nodes stay those of the recipe."""
    images: Any = SimpleNamespace(resolve_image=lambda stage, tag: tag)

    def resolved(stage: Stage, nodes: int | None) -> tuple[Recipe, int]:
        request = DeployRequest(stage, RECIPE, IMAGE, nodes)
        if target == "kuberay":
            found = resolve(images, group_of(manifests, stage, "trn1.32xlarge"), request)[0]
            return RECIPE.source.validate(read_overrides(found.arguments)), found.nodes
        spec = resolve_job(config_of(), images, request).spec
        assert spec.recipe
        return RECIPE.source.validate(read_overrides(spec.recipe.arguments)), spec.nodes

    (compiler, its_nodes), (trainer, nodes) = resolved("compiler", 2), resolved("trainer", 2)
    assert (nodes, trainer.parallel.num_workers) == (2, 2 * trainer.cluster.trainer_workers_per_node)
    assert compiler.parallel == trainer.parallel
    assert artifact_id(compiler, "compile_cache", 1, []) == artifact_id(trainer, "compile_cache", 1, [])
    assert its_nodes == resolved("compiler", None)[1]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_have_the_environment_of_the_contract(kubectl: Path, overlay: str) -> None:
    """Of the head, and of the stages, whose grace period may be shorter on a small machine."""

    def environment_of(container: Thing) -> dict[str, str]:
        return {each["name"]: each["value"] for each in container["env"] if "value" in each}

    cluster = cluster_of(render(OVERLAYS[overlay]))
    head = environment_of(cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0])
    assert head == RAY_ENVIRONMENT | {DRAIN_TIMEOUT_VARIABLE: "0"}
    for stage in STAGES:
        group = worker_group_of(cluster, stage)
        notices = dict.fromkeys(DRAIN_VARIABLES, str(group.drain_seconds))
        assert (notices | find_contract(stage, None).environment).items() <= environment_of(group.container).items()


def test_the_notice_before_an_end_is_the_contract_s_on_both(manifests: dict[str, Thing]) -> None:
    for stage in STAGES:
        group = group_of(manifests, stage, "trn1.32xlarge")
        variables = on_batch(definition_of(stage, config_of()))["environment"]
        assert int(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) == group.drain_seconds
