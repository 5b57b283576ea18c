"""Reads, renders and writes the worker group of a stage in the live RayCluster."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from decimal import Decimal

from kubernetes.utils import parse_quantity

from deploy.stage_contract import DRAIN_VARIABLES, RECIPE, RECIPE_FILE, ROOT, make_command
from k8s.objects.api import Api, Object
from k8s.objects.deployment import Deployment
from k8s.objects.names import (
    CAPACITY_END,
    CHECKPOINT_SECONDS,
    CLUSTER,
    DEFAULT_RECIPE_ANNOTATION,
    DRAIN_ANNOTATION,
    GOOD_IMAGES,
    GROUP_ANNOTATION,
    INSTANCE_TYPE_LABEL,
    NODE_POOL,
    NODE_PRICE,
    NODE_SHAPE,
    QUEUE_ANNOTATION,
    RUN_LABEL,
    VARIANT_ANNOTATION,
    recipe_name,
    stage_annotation,
)
from services.common.errors import DeviceError
from services.common.launch.launcher import STAGE_RESOURCE_PREFIX

DRAIN_MARGIN_SECONDS = 30
"""Seconds that KubeRay and Ray take to end a pod after its stage has ended."""
UNSET = ":unset"
"""The tag of an image that no deployment has chosen yet."""


@dataclass(frozen=True)
class WorkerGroup:
    """The worker group of one stage as it was read, with its RayCluster."""

    name: str
    cluster: Object
    index: int
    """The position of the group in the RayCluster's list, which has no key."""

    @property
    def spec(self) -> Object:
        return dict(self.cluster["spec"]["workerGroupSpecs"][self.index])

    @property
    def pod(self) -> Object:
        return dict(self.spec["template"]["spec"])

    @property
    def container(self) -> Object:
        return dict(self.pod["containers"][0])

    @property
    def image(self) -> str:
        return image_of(self.pod)

    @property
    def has_image(self) -> bool:
        """Whether a deployment has chosen an image."""
        return not self.image.endswith(UNSET)

    @property
    def head_pod(self) -> Object:
        """The head's pod as the RayCluster describes it."""
        return head_pod_of(self.cluster)

    @property
    def replicas(self) -> int:
        return int(self.spec.get("replicas") or 0)

    @property
    def variant(self) -> str:
        return self._required(self.cluster, VARIANT_ANNOTATION)

    @property
    def default_recipe(self) -> str:
        """The recipe file, in the deploying checkout, for deployments that name none; empty where unset."""
        return self._optional(DEFAULT_RECIPE_ANNOTATION)

    @property
    def queue(self) -> str:
        return self._required(self.cluster, QUEUE_ANNOTATION)

    @property
    def pod_group(self) -> str:
        return self._required(self.spec["template"], GROUP_ANNOTATION)

    @property
    def routing_resource(self) -> str:
        """The Ray resource that only this group's pods declare."""
        return f"{STAGE_RESOURCE_PREFIX}{self.name}"

    @property
    def good_images(self) -> list[str]:
        """The images with which the stage ended with exit code 0, oldest first."""
        return list(json.loads(self._optional(stage_annotation(self.name, GOOD_IMAGES)) or "[]"))

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds of the slowest checkpoint of the newest deployment; 0 when none was measured."""
        return float(self._optional(stage_annotation(self.name, CHECKPOINT_SECONDS)) or 0)

    @property
    def drain_seconds(self) -> int:
        """Grace period of a pod's work, in seconds, as the manifests set it."""
        return int(self._required(self.spec["template"], DRAIN_ANNOTATION))

    @property
    def node_pool(self) -> str:
        """The EKS managed node group (CLUSTER/GROUP) of the stage's nodes; empty for static nodes."""
        return self._optional(stage_annotation(self.name, NODE_POOL))

    @property
    def dollars_per_node_hour(self) -> float | None:
        """The price of one node in dollars an hour; None where the manifests give none."""
        text = self._optional(stage_annotation(self.name, NODE_PRICE))
        return float(text) if text else None

    @property
    def capacity_ends_at(self) -> str:
        """The end (RFC 3339) of the capacity reservation for the stage's nodes; empty where there is none."""
        return self._optional(stage_annotation(self.name, CAPACITY_END))

    @property
    def instance_type(self) -> str:
        """The instance type that the pods select or the manifests name; empty for any."""
        selected = (self.pod.get("nodeSelector") or {}).get(INSTANCE_TYPE_LABEL, "")
        return str(selected or self._optional(stage_annotation(self.name, NODE_SHAPE)))

    @property
    def requests(self) -> dict[str, Decimal]:
        """The resource requests of one pod, in the base unit of the resource."""
        requests = self.container.get("resources", {}).get("requests", {})
        return {name: quantity(amount) for name, amount in requests.items()}

    @property
    def ray_cpus(self) -> Decimal:
        """The number of CPUs that one pod has for Ray."""
        return self._ray_counts("CPU", "cpu")

    @property
    def ray_memory_bytes(self) -> Decimal:
        """The memory that one pod has for Ray, in bytes."""
        return self._ray_counts("memory", "memory")

    @property
    def root(self) -> str:
        """The artifact root in a pod of the stage."""
        return self._mount_of(ROOT.name)

    @property
    def recipe_folder(self) -> str:
        return self._mount_of(RECIPE.name)

    @property
    def recipe(self) -> str:
        """The name of the recipe's ConfigMap, which the group's pods mount."""
        return str(self.pod["volumes"][self.recipe_index]["configMap"]["name"])

    @property
    def recipe_index(self) -> int:
        return next(index for index, volume in enumerate(self.pod["volumes"]) if volume["name"] == RECIPE.name)

    def entrypoint(self, arguments: list[str]) -> list[str]:
        """The stage's command as words for the shell of Ray's job."""
        command = make_command(self.name, f"{self.recipe_folder}/{RECIPE_FILE}", self.root, arguments)
        # exec: without it SIGTERM ends the shell, the stage's process is left to process 1 of the pod, which reaps
        # nothing, and Ray waits for the zombie until it gives up.
        return ["exec", *command]

    def _ray_counts(self, resource: str, limit: str) -> Decimal:
        """A resource that the group declares to Ray, or else the limit of its pods."""
        declared, limits = self.spec.get("resources") or {}, self.container.get("resources", {}).get("limits", {})
        return quantity(str(declared.get(resource) or limits.get(limit, "0")))

    def _mount_of(self, volume: str) -> str:
        return str(next(each["mountPath"] for each in self.container["volumeMounts"] if each["name"] == volume))

    def _optional(self, annotation: str) -> str:
        """An annotation of the RayCluster; empty where it is absent."""
        return str((self.cluster["metadata"].get("annotations") or {}).get(annotation, ""))

    def _required(self, thing: Object, annotation: str) -> str:
        """An annotation of the RayCluster or of the group's template. Raises `DeviceError` where it is absent."""
        value = (thing["metadata"].get("annotations") or {}).get(annotation)
        if value is None:
            raise DeviceError(
                f"RayCluster {CLUSTER} with worker group {self.name} has no annotation {annotation}. Correct the "
                f"manifests in k8s/, then: make cluster-up"
            )
        return str(value)


def read_cluster(api: Api) -> Object:
    """Read the RayCluster. Raises `DeviceError` when it does not exist."""
    cluster = api.find("RayCluster", CLUSTER)
    if cluster is None:
        raise DeviceError(f"{api.server} has no RayCluster {CLUSTER} in namespace {api.namespace}: make cluster-up")
    return cluster


def read_worker_group(api: Api, name: str) -> WorkerGroup:
    """Read the stage's worker group. Raises `DeviceError` when the RayCluster or the group is absent."""
    return worker_group_of(read_cluster(api), name)


def worker_group_of(cluster: Object, name: str) -> WorkerGroup:
    groups = [group["groupName"] for group in cluster["spec"].get("workerGroupSpecs") or []]
    if name not in groups:
        raise DeviceError(
            f"RayCluster {CLUSTER} has no worker group {name}; it has {', '.join(groups) or 'none'}. "
            f"k8s/stages/{name} defines it: make cluster-up"
        )
    return WorkerGroup(name, cluster, groups.index(name))


def head_pod_of(cluster: Object) -> Object:
    """The head's pod as the RayCluster describes it."""
    return dict(cluster["spec"]["headGroupSpec"]["template"]["spec"])


def image_of(pod: Object) -> str:
    """The image of a Ray pod's first container."""
    return str(pod["containers"][0]["image"])


def quantity(text: str) -> Decimal:
    """Parse a Kubernetes quantity such as `200m` or `4Gi`."""
    return Decimal(parse_quantity(text))


def render_worker_group(worker_group: WorkerGroup, deployment: Deployment) -> Object:
    """The worker group with the image, recipe, drain time and run's label of a deployment."""
    group = copy.deepcopy(worker_group.spec)
    group["template"].setdefault("metadata", {}).setdefault("labels", {})[RUN_LABEL] = deployment.run_label
    pod = group["template"]["spec"]
    pod["containers"][0]["image"] = deployment.image
    pod["volumes"][worker_group.recipe_index]["configMap"]["name"] = recipe_name(
        worker_group.name, deployment.recipe_digest
    )
    for variable in pod["containers"][0]["env"]:
        if variable["name"] in DRAIN_VARIABLES:
            variable["value"] = str(deployment.drain_seconds)
    pod["terminationGracePeriodSeconds"] = deployment.drain_seconds + DRAIN_MARGIN_SECONDS
    return group


def scale_down(api: Api, group: WorkerGroup) -> None:
    """Set the worker group to 0 replicas. Raises `Conflict`."""
    if group.replicas:
        replace_group(api, group, group.spec | {"replicas": 0})


def replace_group(api: Api, worker_group: WorkerGroup, group: Object) -> None:
    """Write a worker group in one piece. Raises `Conflict` when the RayCluster has changed since it was read.

    The list of groups has no key, so server-side apply cannot own a single group.
    """
    metadata = worker_group.cluster["metadata"]
    lock = {"resourceVersion": metadata["resourceVersion"]}
    patch = {"metadata": lock, "spec": {"workerGroupSpecs": groups_with(worker_group, group)}}
    api.merge("RayCluster", metadata["name"], patch)


def groups_with(worker_group: WorkerGroup, group: Object) -> list[Object]:
    """The RayCluster's worker groups with the stage's group replaced by `group`."""
    groups = list(worker_group.cluster["spec"]["workerGroupSpecs"])
    groups[worker_group.index] = group
    return groups
