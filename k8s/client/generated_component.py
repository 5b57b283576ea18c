"""Writes an overlay's kustomize component `generated` from its settings.env and the shapes of its nodes.

Registry, file system, sizes, nodes and largest number of a stage's pods, the queue's capability and the quota follow
from them: a pod takes a whole node (`infra/shapes.json`). An overlay's own patches come after its components, and win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent

import yaml

from deploy.stage_contract import EFA_ENVIRONMENT, SHARED_MEMORY, Resources
from images.platforms import find_variant
from k8s.client.settings_env import CPU, SETTINGS, TRAINIUM, Pool, compiler_pool_of, read_pool, read_settings
from k8s.client.stage_image import full_name
from k8s.objects.api import Object
from k8s.objects.names import (
    CAPACITY_END,
    DEFAULT_RECIPE_ANNOTATION,
    EFA,
    IMAGES_ANNOTATION,
    INSTANCE_TYPE_LABEL,
    NEURON,
    NODE_POOL,
    NODE_PRICE,
    NODE_SHAPE,
    ONE_OFF_CPUS_ANNOTATION,
    ONE_OFF_MEMORY_ANNOTATION,
    ONE_OFF_POOL_ANNOTATION,
    POOL_LABEL,
    REGION_ANNOTATION,
    VARIANT_ANNOTATION,
    stage_annotation,
)
from services.common.artifacts.manifest import write_durably
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES

GENERATED = "generated"
HEADER = """\
# Written by `make cluster-up`, also with DRY_RUN=1, from settings.env and infra/shapes.json. Change those, or add
# patches to the overlay, which come after these.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
"""
JOBS, REQUESTS_OF_JOBS = 60, Resources(cpus=12, memory_gib=60, storage_gib=0)
"""The quota's Jobs (k8s/base/quota.yaml), of 200m and 1 GiB at most each (k8s/base/pod-admission.yaml)."""
HEADS, HEAD = 2 + len(STAGES), Resources(cpus=4, memory_gib=8, storage_gib=10)
"""The cluster's head (k8s/base/raycluster.yaml), its replacement, and one for each isolated stage."""
ONE_OFFS = 4
"""Largest number of concurrent one-offs, each as large as a pod of a CPU node."""
SCRATCH_SIZES = {TRAINIUM: "350Gi", CPU: "80Gi"}
"""By the pod's pool."""
PLACEHOLDER = "CHANGE-ME"
"""A value that `cluster-up` refuses."""
REAPER = "/spec/jobTemplate/spec/template/spec/containers/0"
IN_GIB = ("memory", "ephemeral-storage", "hugepages-2Mi")


def write_component(overlay: Path) -> None:
    """Write the components of the overlay, and of the overlays that it builds on, where there is a settings.env.

    Raises `RecipeError` for wrong settings, and for an overlay that does not use its component.
    """
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))
    for resource in kustomization.get("resources", []):
        if (overlay / resource / "kustomization.yaml").is_file():
            write_component(overlay / resource)
    if (overlay / SETTINGS).is_file():
        if GENERATED not in kustomization.get("components", []):
            raise RecipeError(
                f"{overlay}/kustomization.yaml: {SETTINGS} needs resources: [../../base] and "
                f"components: [../../aws, {GENERATED}], as k8s/overlays/existing has"
            )
        text, file = render_component(read_settings(overlay / SETTINGS)), overlay / GENERATED / "kustomization.yaml"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(exist_ok=True)
            write_durably(file, text.encode())


def render_component(settings: dict[str, str]) -> str:
    """The component as YAML."""
    pools = {name: read_pool(settings, name) for name in (TRAINIUM, CPU)}
    groups = {"tokenizer": pools[CPU], "compiler": pools[compiler_pool_of(settings)], "trainer": pools[TRAINIUM]}
    folder = f"{settings['REGISTRY']}/millrace/".lstrip("/")
    images = [{"name": f"millrace/{name}", "newName": f"{folder}{name}"} for name in ("head", *STAGES)]
    capability = _amounts((pool.shape.pod_resources, pool.max_nodes) for pool in pools.values())
    handle, server, mount = (settings[f"FSX_{key}"] or PLACEHOLDER for key in ("ID", "DNS_NAME", "MOUNT_NAME"))
    source = {"volumeHandle": handle, "volumeAttributes": {"dnsname": server, "mountname": mount}}
    patches = [
        _patch("Namespace", "millrace", _set("/metadata/annotations", _limit_jobs(folder, pools[CPU]))),
        _patch("ResourceQuota", "millrace", _set("/spec/hard", _quota(list(groups.values()), pools[CPU]))),
        _patch("Queue", "millrace", _set("/spec", {"capability": capability})),
        _patch("PersistentVolume", "millrace-fsx.*", _set("/spec/csi", source)),
        _patch("RayCluster", "millrace", _set("/metadata/annotations", _describe(settings, groups))),
        *(_patch("RayCluster", "millrace", _size(index, name, groups[name])) for index, name in enumerate(STAGES)),
    ]
    if region := settings["REGION"]:  # the reaper calls EKS as deploy Jobs do
        patches.append(_patch("CronJob", "reaper", _set(REAPER, {"env": [{"name": "AWS_REGION", "value": region}]})))
    return "".join([HEADER, yaml.safe_dump({"images": images}, default_flow_style=None), "patches:\n", *patches])


def _patch(kind: str, name: str, operations: Iterable[Object]) -> str:
    text = yaml.safe_dump(list(operations), sort_keys=False, default_flow_style=None, width=120)
    return f"- target: {{kind: {kind}, name: {name}}}\n  patch: |-\n{indent(text, ' ' * 4)}"


def _set(path: str, values: Object) -> Iterator[Object]:
    return (_add(f"{path}/{name.replace('/', '~1')}", value) for name, value in values.items())


def _add(path: str, value: object) -> Object:
    """A JSON patch's operation; it replaces a value that is there."""
    return {"op": "add", "path": path, "value": value}


def _limit_jobs(folder: str, cpu: Pool) -> dict[str, str]:
    """Annotations of the namespace: which images may run, and where and how large a one-off may be."""
    pod = _amounts([(cpu.shape.pod_resources, 1)])
    return {
        IMAGES_ANNOTATION: " ".join(sorted({folder, full_name(folder)})),
        ONE_OFF_POOL_ANNOTATION: cpu.name,
        ONE_OFF_CPUS_ANNOTATION: pod["cpu"],
        ONE_OFF_MEMORY_ANNOTATION: pod["memory"],
    }


def _quota(pools: list[Pool], cpu: Pool) -> dict[str, str]:
    """The requests of all pods: worker groups at full size, heads, Jobs and one-offs."""
    stages = [(pool.shape.pod_resources, pool.max_nodes) for pool in pools]
    total = _amounts([(REQUESTS_OF_JOBS, 1), (HEAD, HEADS), (cpu.shape.pod_resources, ONE_OFFS), *stages])
    pods = JOBS + HEADS + ONE_OFFS + sum(count for _, count in stages)
    return {"pods": str(pods)} | {f"requests.{name}": total.get(name, "0") for name in ("cpu", "memory", NEURON, EFA)}


def _describe(settings: dict[str, str], groups: dict[str, Pool]) -> dict[str, str]:
    """Annotations of the RayCluster. On a pod's template a new price would change the pods."""
    found = {
        VARIANT_ANNOTATION: find_variant(groups["trainer"].shape.name),
        REGION_ANNOTATION: settings["REGION"],
        DEFAULT_RECIPE_ANNOTATION: settings["RECIPE"],
    }
    for stage, pool in groups.items():
        price = pool.shape.price
        found |= {
            stage_annotation(stage, NODE_POOL): pool.node_group,
            stage_annotation(stage, NODE_SHAPE): pool.shape.name,
            stage_annotation(stage, NODE_PRICE): f"{price.dollars_per_hour:.2f}" if price else "",
            stage_annotation(stage, CAPACITY_END): pool.capacity_ends_at,
        }
    return {name: text for name, text in found.items() if text}


def _size(index: int, stage: str, pool: Pool) -> Iterator[Object]:
    """Make the stage's pods as large as a node of the pool allows, and bind them to these nodes."""
    group, resources = f"/spec/workerGroupSpecs/{index}", pool.shape.pod_resources
    pod, container = f"{group}/template/spec", f"{group}/template/spec/containers/0"
    amounts, selector = _amounts([(resources, 1)]), {POOL_LABEL: pool.name}
    yield {"op": "test", "path": f"{group}/groupName", "value": stage}
    yield _add(f"{group}/maxReplicas", pool.max_nodes)
    yield _add(f"{group}/resources/CPU", str(resources.cpus))
    yield _add(f"{container}/resources", {"requests": amounts, "limits": dict(amounts)})
    yield _add(f"{pod}/volumes/0/emptyDir/sizeLimit", SCRATCH_SIZES[pool.name])
    if resources.neuron_devices:
        selector[INSTANCE_TYPE_LABEL] = pool.shape.name
        yield _add(f"{group}/resources/neuron_cores", str(resources.neuron_cores))  # Ray does not read it from limits
        yield _add(f"{pod}/tolerations", [{"key": NEURON, "operator": "Exists", "effect": "NoSchedule"}])
    yield _add(f"{pod}/nodeSelector", selector)
    if resources.shared_memory_gib:  # the operator's default is as large as the pod's memory
        memory = {"medium": "Memory", "sizeLimit": f"{resources.shared_memory_gib}Gi"}
        yield _add(f"{pod}/volumes/-", {"name": SHARED_MEMORY.name, "emptyDir": memory})
        yield _add(f"{container}/volumeMounts/-", {"name": SHARED_MEMORY.name, "mountPath": SHARED_MEMORY.path})
    if resources.efa_cards:
        yield from (_add(f"{container}/env/-", {"name": k, "value": v}) for k, v in EFA_ENVIRONMENT.items())


def _amounts(pods: Iterable[tuple[Resources, int]]) -> dict[str, str]:
    """The resources of so many pods of each size, with the names and units of Kubernetes."""
    total: Counter[str] = Counter()
    for size, count in pods:
        amounts = {
            "cpu": size.cpus,
            "memory": size.memory_gib,
            "ephemeral-storage": size.storage_gib,
            "hugepages-2Mi": size.huge_pages_gib,
            NEURON: size.neuron_devices,
            EFA: size.efa_cards,
        }
        total.update({name: amount * count for name, amount in amounts.items()})
    return {name: f"{amount}{'Gi' if name in IN_GIB else ''}" for name, amount in total.items() if amount}
