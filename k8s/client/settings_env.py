"""Completes an overlay's objects from its settings, the file `settings.env`.

An overlay of a cluster in AWS has its region, its registry, and the shapes of its two node pools in that file.
kustomize carries the settings as a ConfigMap, which is never applied. The sizes and nodes of pods, Ray's resources, the
queue's capability and the largest number of pods follow from the shapes (`infra/shapes.json`), and the environment of
Ray containers from their stages' contracts. Values that the overlay's objects have themselves are kept.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from deploy.reservation import read_end
from deploy.stage_contract import HEAD_ENVIRONMENT, SHARED_MEMORY, Resources, StageContract, find_contract
from images.platforms import find_variant, read_neuron_nodes
from infra.shapes import Shape, find_shape
from k8s.client.bounds import fill_images, fill_one_off, fill_quota
from k8s.objects.api import Object
from k8s.objects.names import (
    DEFAULT_RECIPE_ANNOTATION,
    DRAIN_ANNOTATION,
    EFA,
    INSTANCE_TYPE_LABEL,
    NEURON,
    POOL_LABEL,
    REGION_ANNOTATION,
    VARIANT_ANNOTATION,
    capacity_end_annotation,
    node_pool_annotation,
    node_price_annotation,
    node_shape_annotation,
)
from services.common.errors import DeviceError, RecipeError
from services.common.recipe.schema import STAGES

CONFIG_MAP = "overlay-settings"
OUR_IMAGES = "millrace/"
FSX_DRIVER = "fsx.csi.aws.com"
TRAINIUM = "trainium"
"""The pool of nodes with Neuron devices."""
POOLS = (TRAINIUM, "cpu")
"""The pools that the infrastructure creates. An overlay's groups may select others."""
POOL_KEYS = ("SHAPE", "NODE_GROUP", "MAX_NODES")
"""Keys of a pool, which follow the pool's name in capitals."""
COMPILER_POOL = "COMPILER_POOL"
KEYS = (
    *("REGION", "CLUSTER_NAME", "REGISTRY", "FSX_ID", "FSX_DNS_NAME", "FSX_MOUNT_NAME", "CAPACITY_ENDS_AT"),
    *(COMPILER_POOL, "RECIPE"),
)
TRAINIUM_SCRATCH = "350Gi"
"""Scratch space of a pod that has a Trainium node to itself."""


@dataclass(frozen=True)
class Pool:
    """Nodes of one shape. Each node runs one pod of a stage."""

    name: str
    shape: Shape
    max_nodes: int
    node_group: str
    """`<EKS cluster>/<managed node group>`, which is scaled for a deployment; empty for static nodes."""
    capacity_ends_at: str
    """End of the capacity reservation (RFC 3339); empty where there is none."""


def fill_in(objects: list[Object]) -> list[Object]:
    """The objects of an overlay, completed from its settings, without the ConfigMap of the settings.

    Raises `RecipeError` for a setting that is missing or wrong.
    """
    settings = _find_settings(objects)
    filled = copy.deepcopy([each for each in objects if each["metadata"]["name"] != CONFIG_MAP])
    for cluster in _of_kind(filled, "RayCluster"):
        _move_compiler(cluster, settings)
        pools = _read_pools(cluster, settings)
        _fill_cluster(cluster, pools, settings)
        for queue in _of_kind(filled, "Queue"):
            if pools and "capability" not in queue["spec"]:
                queue["spec"]["capability"] = _amounts(_sum(list(pools.values())))
    for volume in _of_kind(filled, "PersistentVolume"):
        if volume["spec"].get("csi", {}).get("driver") == FSX_DRIVER:
            _fill_volume(volume, settings)
    for pod in _pods_of(filled):
        _set_registry(pod, settings.get("REGISTRY", ""))
    for cluster in _of_kind(filled, "RayCluster"):  # after its pods have their images and sizes
        for namespace in _of_kind(filled, "Namespace"):
            if namespace["metadata"]["name"] == cluster["metadata"]["namespace"]:
                fill_images(namespace, cluster)
                fill_one_off(namespace, cluster)
        for quota in _of_kind(filled, "ResourceQuota"):
            fill_quota(quota, cluster)
    for job in _of_kind(filled, "CronJob"):  # the reaper, which calls EKS as deploy Jobs do
        if settings.get("REGION"):
            [container] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
            _add_variables(container, {"AWS_REGION": settings["REGION"]})
    return filled


def _find_settings(objects: list[Object]) -> dict[str, str]:
    """The settings; empty for an overlay without settings, whose objects are complete."""
    found = [each for each in _of_kind(objects, "ConfigMap") if each["metadata"]["name"] == CONFIG_MAP]
    settings: dict[str, str] = dict(found[0].get("data") or {}) if found else {}
    pools = {name for cluster in _of_kind(objects, "RayCluster") for name in _selected_pools(cluster)}
    known = [*KEYS, *(f"{pool.upper()}_{key}" for pool in sorted(pools | set(POOLS)) for key in POOL_KEYS)]
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"do you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise RecipeError(f"settings.env: unknown key {key}; {meant}")
        # kustomize reads a line literally: quotes become part of the value, and a space before `=` part of the key.
        if re.search(r"[\s\"']", value):
            raise RecipeError(f"settings.env: {key}={value}: expected {key}=VALUE, without quotes, spaces or a comment")
    return settings


def _move_compiler(cluster: Object, settings: dict[str, str]) -> None:
    """Move the compiler's pods to the pool of COMPILER_POOL, where the settings have it."""
    if not (name := settings.get(COMPILER_POOL)):
        return
    if name not in POOLS:
        raise RecipeError(
            f"settings.env: {COMPILER_POOL}={name}: expected {' or '.join(POOLS)}. {TRAINIUM} traces graphs on "
            f"devices, whose nodes are held until the last graph is compiled; cpu traces and compiles without a device"
        )
    [group] = [each for each in cluster["spec"]["workerGroupSpecs"] if each["groupName"] == "compiler"]
    pod = group["template"]["spec"]
    pod["nodeSelector"] = (pod.get("nodeSelector") or {}) | {POOL_LABEL: name}
    if name == TRAINIUM:
        [scratch] = [volume for volume in pod["volumes"] if volume["name"] == "scratch"]
        scratch["emptyDir"] = {"sizeLimit": TRAINIUM_SCRATCH}


def _read_pools(cluster: Object, settings: dict[str, str]) -> dict[str, Pool]:
    """The pools that worker groups select, by their name."""
    return {name: _read_pool(name, group, settings) for name, group in _selected_pools(cluster).items()}


def _selected_pools(cluster: Object) -> dict[str, str]:
    """Names of the selected pools, each with a worker group that selects it."""
    return {name: group["groupName"] for group in cluster["spec"]["workerGroupSpecs"] if (name := _pool_of(group))}


def _read_pool(name: str, group: str, settings: dict[str, str]) -> Pool:
    def read(key: str) -> str:
        if not settings.get(f"{prefix}_{key}"):
            raise RecipeError(
                f"worker group {group} selects nodes of {POOL_LABEL}={name}, but the overlay has no {prefix}_{key}: "
                f"add it to settings.env (k8s/overlays/eks has an example), or give the group a size of its own and no "
                f"such selector (k8s/overlays/local)"
            )
        return settings[f"{prefix}_{key}"]

    prefix = name.upper()
    if not read("MAX_NODES").isdecimal() or not int(read("MAX_NODES")):
        raise RecipeError(f"settings.env: {prefix}_MAX_NODES={read('MAX_NODES')}: expected a whole number from 1 on")
    shape = find_shape(read("SHAPE"))
    if bool(shape.neuron_devices) != (name == TRAINIUM) or shape.gpus:
        raise RecipeError(
            f"settings.env: {prefix}_SHAPE={shape.name} has {shape.neuron_devices} Neuron devices and {shape.gpus} "
            f"GPUs: {TRAINIUM.upper()}_SHAPE must have Neuron devices, and another pool's shape must have neither. "
            f"Types with GPUs serve only for plans"
        )
    cluster, node_group = settings.get("CLUSTER_NAME"), settings.get(f"{prefix}_NODE_GROUP")
    ends_at = settings.get("CAPACITY_ENDS_AT", "") if shape.neuron_devices else ""
    if ends_at:
        try:
            read_end(ends_at)
        except DeviceError as error:
            raise RecipeError(f"settings.env: {error}") from error
    return Pool(
        name=name,
        shape=shape,
        max_nodes=int(read("MAX_NODES")),
        node_group=f"{cluster}/{node_group}" if cluster and node_group else "",
        capacity_ends_at=ends_at,
    )


def _fill_cluster(cluster: Object, pools: dict[str, Pool], settings: dict[str, str]) -> None:
    annotations = cluster["metadata"].setdefault("annotations", {})
    told = {
        REGION_ANNOTATION: settings.get("REGION"),
        DEFAULT_RECIPE_ANNOTATION: settings.get("RECIPE"),
    }
    if TRAINIUM in pools and annotations.get(VARIANT_ANNOTATION) in read_neuron_nodes():
        told[VARIANT_ANNOTATION] = find_variant(pools[TRAINIUM].shape.name)
    annotations.update({name: text for name, text in told.items() if text})
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    _add_variables(head, HEAD_ENVIRONMENT)
    for group in cluster["spec"]["workerGroupSpecs"]:
        pool = pools.get(_pool_of(group))
        if group["groupName"] in STAGES:
            contract = find_contract(group["groupName"], pool.shape.pod_resources if pool else None)
            _fill_environment(group, contract)
        if pool:
            _fill_size(group, pool)
            for name, text in _describe_nodes(group["groupName"], pool).items():
                annotations.setdefault(name, text)


def _fill_environment(group: Object, contract: StageContract) -> None:
    """Add the contract's environment, with the group's own drain, which may be shorter on a small machine."""
    drain_seconds = group["template"]["metadata"]["annotations"].get(DRAIN_ANNOTATION, contract.drain_seconds)
    container = group["template"]["spec"]["containers"][0]
    _add_variables(container, contract.with_drain(int(drain_seconds)).variables)
    named = {each["name"] for each in container["env"]}
    for each in contract.secrets:
        if each.name not in named:
            reference = {"name": each.secret, "key": each.key, "optional": True}
            container["env"].append({"name": each.name, "valueFrom": {"secretKeyRef": reference}})


def _fill_size(group: Object, pool: Pool) -> None:
    """Make the group's pods as large as a node of the pool allows, and bind them to these nodes."""
    template, resources = group["template"], pool.shape.pod_resources
    pod, container = template["spec"], template["spec"]["containers"][0]
    group.setdefault("maxReplicas", pool.max_nodes)
    group["resources"] = _ray_resources(resources) | group.get("resources", {})
    container.setdefault("resources", {"requests": _amounts(resources), "limits": _amounts(resources)})
    if resources.neuron_devices:
        pod["nodeSelector"][INSTANCE_TYPE_LABEL] = pool.shape.name
        pod.setdefault("tolerations", []).append({"key": NEURON, "operator": "Exists", "effect": "NoSchedule"})
    if resources.shared_memory_gib:  # the operator's default is as large as the pod's memory
        size = f"{resources.shared_memory_gib}Gi"
        pod["volumes"].append({"name": SHARED_MEMORY.name, "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        container["volumeMounts"].append({"name": SHARED_MEMORY.name, "mountPath": SHARED_MEMORY.path})


def _describe_nodes(stage: str, pool: Pool) -> dict[str, str]:
    """Annotations of the RayCluster about a stage's nodes. On the pod template a new price would change pods."""
    told = {
        node_pool_annotation(stage): pool.node_group,
        node_shape_annotation(stage): pool.shape.name,
        node_price_annotation(stage): f"{pool.shape.price.dollars_per_hour:.2f}" if pool.shape.price else "",
        capacity_end_annotation(stage): pool.capacity_ends_at,
    }
    return {key: value for key, value in told.items() if value}


def _fill_volume(volume: Object, settings: dict[str, str]) -> None:
    source = volume["spec"]["csi"]
    attributes = source.setdefault("volumeAttributes", {})
    fields = {
        "FSX_ID": (source, "volumeHandle"),
        "FSX_DNS_NAME": (attributes, "dnsname"),
        "FSX_MOUNT_NAME": (attributes, "mountname"),
    }
    for key, (part, field) in fields.items():
        if field not in part and not settings.get(key):
            raise RecipeError(f"volume {volume['metadata']['name']}: the overlay's settings.env has no {key}")
        part.setdefault(field, settings.get(key))


def _set_registry(pod: Object, registry: str) -> None:
    for container in pod["containers"]:
        if registry and container["image"].startswith(OUR_IMAGES):
            container["image"] = f"{registry}/{container['image']}"


def _add_variables(container: Object, variables: dict[str, str]) -> None:
    """Add variables before the overlay's own, which take precedence."""
    own = container.get("env", [])
    named = {each["name"] for each in own}
    container["env"] = [{"name": k, "value": v} for k, v in variables.items() if k not in named] + own


def _ray_resources(resources: Resources) -> dict[str, str]:
    """Ray's resources of a pod. Ray would read CPUs from the pod's limits, but not NeuronCores."""
    cores = {"neuron_cores": str(resources.neuron_cores)} if resources.neuron_cores else {}
    return {"CPU": str(resources.cpus)} | cores


def _amounts(resources: Resources) -> dict[str, str]:
    """The resources with the names and units of Kubernetes."""
    amounts = {
        "cpu": f"{resources.cpus}",
        "memory": f"{resources.memory_gib}Gi",
        "ephemeral-storage": f"{resources.storage_gib}Gi",
        "hugepages-2Mi": f"{resources.huge_pages_gib}Gi" if resources.huge_pages_gib else "",
        NEURON: f"{resources.neuron_devices or ''}",
        EFA: f"{resources.efa_cards or ''}",
    }
    return {name: amount for name, amount in amounts.items() if amount}


def _sum(pools: list[Pool]) -> Resources:
    """The resources of all pods on all nodes of the pools."""
    shares = [[amount * pool.max_nodes for amount in astuple(pool.shape.pod_resources)] for pool in pools]
    return Resources(*map(sum, zip(*shares, strict=True)))


def _pool_of(group: Object) -> str:
    return str((group["template"]["spec"].get("nodeSelector") or {}).get(POOL_LABEL, ""))


def _pods_of(objects: list[Object]) -> Iterator[Object]:
    for each in objects:
        spec = each.get("spec") or {}
        if each["kind"] == "RayCluster":
            yield spec["headGroupSpec"]["template"]["spec"]
            yield from (group["template"]["spec"] for group in spec["workerGroupSpecs"])
        if each["kind"] == "CronJob":
            yield spec["jobTemplate"]["spec"]["template"]["spec"]
        if each["kind"] == "Job":
            yield spec["template"]["spec"]


def _of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]
