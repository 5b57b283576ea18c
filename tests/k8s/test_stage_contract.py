"""The worker groups as they are applied and the contract of the stages say the same."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from kubernetes.utils.quantity import parse_quantity

from deploy.stage_contract import Resources, StageContract, find_contract, make_command
from images.registry import repository_of
from infra.shapes import find_shape
from k8s.objects.worker_group import DRAIN_MARGIN_SECONDS, worker_group_of
from services.common.recipe.schema import STAGES, Stage
from tests.k8s.rendered import OVERLAYS, REMOVED, Thing, changed, cluster_of, environment_of

TRAINIUM, CPU = find_shape("trn1.32xlarge").pod_resources, find_shape("m7i.8xlarge").pod_resources
RESOURCES: dict[str, dict[Stage, Resources | None]] = {
    "local": dict.fromkeys(STAGES),
    "eks": {"tokenizer": CPU, "compiler": TRAINIUM, "trainer": TRAINIUM},
}
GIB = 2**30


def breaches_of(contract: StageContract, things: list[Thing]) -> list[str]:
    """List the values of the stage's worker group that differ from the contract."""
    group = worker_group_of(cluster_of(things), contract.stage)
    container = group.container
    found: dict[str, tuple[Any, Any]] = {
        "image": (repository_of(group.image).removeprefix("CHANGE-ME/"), contract.repository),
        "environment": (
            environment_of(container),
            contract.variables | {each.name: f"secret {each.secret}/{each.key}" for each in contract.secrets},
        ),
        "mounts": (
            {each["name"]: (each["mountPath"], each.get("readOnly", False)) for each in container["volumeMounts"]},
            {each.name: (each.path, each.is_read_only) for each in contract.mounts},
        ),
        "volumes": (
            {volume["name"]: kind_of(volume) for volume in group.pod["volumes"]},
            {each.name: each.kind for each in contract.mounts},
        ),
        "command": (
            group.entrypoint(["--a"]),
            [
                "exec",
                *make_command(contract.stage, "/recipe/recipe.toml", "/fsx", ["--a"]),
            ],
        ),
        "drain": (group.drain_seconds, contract.drain_seconds),
        "grace": (group.pod["terminationGracePeriodSeconds"] >= contract.drain_seconds + DRAIN_MARGIN_SECONDS, True),
    }
    if contract.resources:
        found["resources"] = (group.requests, requests_of(contract.resources))
        found["shared memory"] = (shared_memory_of(group.pod), contract.resources.shared_memory_gib * GIB)
    return [
        f"{contract.stage}: {what} is {has}, not {wanted}" for what, (has, wanted) in found.items() if has != wanted
    ]


def kind_of(volume: Thing) -> str:
    if volume.get("emptyDir", {}).get("medium") == "Memory":
        return "memory"
    kinds = {"emptyDir": "temporary", "persistentVolumeClaim": "shared", "configMap": "recipe"}
    return next(kind for key, kind in kinds.items() if key in volume)


def shared_memory_of(pod: Thing) -> Decimal:
    sizes = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if kind_of(volume) == "memory"]
    return sum(map(parse_quantity, sizes), Decimal(0))


def requests_of(resources: Resources) -> dict[str, Decimal]:
    """The contract's requests in the resources and units of Kubernetes."""
    amounts = {
        "cpu": resources.cpus,
        "memory": resources.memory_gib * GIB,
        "ephemeral-storage": resources.storage_gib * GIB,
        "hugepages-2Mi": resources.huge_pages_gib * GIB,
        "aws.amazon.com/neuron": resources.neuron_devices,
        "vpc.amazonaws.com/efa": resources.efa_cards,
    }
    return {name: parse_quantity(str(amount)) for name, amount in amounts.items() if amount}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_group_keeps_the_contract(overlays: dict[str, list[Thing]], overlay: str, stage: Stage) -> None:
    contract = find_contract(stage, RESOURCES[overlay][stage])
    if overlay == "local":  # its checkpoints are small
        contract = contract.with_drain(worker_group_of(cluster_of(overlays[overlay]), stage).drain_seconds)
    assert breaches_of(contract, overlays[overlay]) == []


def test_the_compiler_may_be_put_on_cpu_nodes(compiler_on_cpus: list[Thing]) -> None:
    assert breaches_of(find_contract("compiler", CPU), compiler_on_cpus) == []
    assert breaches_of(find_contract("trainer", TRAINIUM), compiler_on_cpus) == []


POD = "/spec/workerGroupSpecs/2/template/spec"
CONTAINER = f"{POD}/containers/0"


@pytest.mark.parametrize(
    ("pointer", "value", "reported"),
    [
        (f"{CONTAINER}/image", "millrace/compiler:unset", "trainer: image is millrace/compiler"),
        (f"{CONTAINER}/env/9/value", "32", "trainer: environment is"),
        (f"{CONTAINER}/env/9", REMOVED, "trainer: environment is"),
        (f"{CONTAINER}/volumeMounts/1/mountPath", "/data", "trainer: mounts is"),
        (f"{CONTAINER}/volumeMounts/2/readOnly", False, "trainer: mounts is"),
        (f"{CONTAINER}/resources/requests/cpu", "128", "trainer: resources is"),
        (f"{CONTAINER}/resources/requests/aws.amazon.com~1neuron", "8", "trainer: resources is"),
        (f"{POD}/terminationGracePeriodSeconds", 300, "trainer: grace is"),
        (f"{POD}/volumes/3/emptyDir/sizeLimit", "440Gi", "trainer: shared memory is"),
        (f"{POD}/volumes/3/emptyDir/medium", REMOVED, "trainer: volumes is"),
    ],
)
def test_a_worker_group_that_breaks_it_is_noticed(
    overlays: dict[str, list[Thing]], pointer: str, value: object, reported: str
) -> None:
    things = changed(overlays["eks"], "RayCluster/millrace", pointer, value)
    assert reported in " ".join(breaches_of(find_contract("trainer", TRAINIUM), things))


def test_a_contract_that_changes_is_noticed(overlays: dict[str, list[Thing]]) -> None:
    contract = find_contract("trainer", TRAINIUM)
    assert breaches_of(contract.with_drain(500), overlays["eks"])
