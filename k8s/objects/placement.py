"""Finds the pods of a stage, and explains in one sentence why some are not placed or not ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from k8s.objects.api import Api, Object, conditions_of, has_condition
from k8s.objects.names import CLUSTER, COMPONENT_LABEL
from k8s.objects.worker_group import WorkerGroup

PASSING = frozenset({"PodInitializing", "ContainerCreating", ""})
"""Reasons for which a container waits that pass by themselves; every other reason needs a person."""
TELLING_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedScheduling", "FailedCreatePodSandBox", "Failed")


def pods_of(api: Api, stage: str) -> list[Object]:
    """The stage's worker pods, in a shared or an isolated Ray cluster, terminating pods included."""
    return api.find_all("Pod", f"{COMPONENT_LABEL}={stage},ray.io/node-type=worker")


def addresses_of(api: Api, stage: str) -> set[str]:
    """IP addresses of the stage's worker pods that are placed and not terminating."""
    pods = [pod for pod in pods_of(api, stage) if "deletionTimestamp" not in pod["metadata"]]
    return {str(pod["status"]["podIP"]) for pod in pods if pod.get("status", {}).get("podIP")}


def heads_of(api: Api) -> list[Object]:
    """The head pods of the shared RayCluster; two of them while one replaces the other."""
    return api.find_all("Pod", f"ray.io/cluster={CLUSTER},ray.io/node-type=head")


def is_ready(pod: Object) -> bool:
    """Whether a pod is Ready and not terminating."""
    return has_condition(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]


def explain_placement(api: Api, group: WorkerGroup, nodes: int) -> str:
    """Explain in one sentence why fewer than `nodes` pods of the stage are ready; empty when all are."""
    pods = [pod for pod in pods_of(api, group.name) if "deletionTimestamp" not in pod["metadata"]]
    waiting = [pod for pod in pods if not is_ready(pod)]
    ready = len(pods) - len(waiting)
    if ready >= nodes:
        return ""
    count = f"{ready} of {nodes} {group.name} pods are ready"
    unplaced = [pod for pod in waiting if not pod["spec"].get("nodeName")]
    if unplaced:
        return f"{count}: {_explain_unplaced(api, group, unplaced)}"
    if len(pods) < nodes:
        why = newest_event(api, group.cluster) or "the KubeRay operator makes them"
        return f"{count}: {nodes - len(pods)} do not exist yet; {why}"
    reasons = Counter(explain_start(api, pod) for pod in waiting)
    return f"{count}: " + "; ".join(_counted(reasons))


def _explain_unplaced(api: Api, worker_group: WorkerGroup, pods: list[Object]) -> str:
    group = api.find("PodGroup", worker_group.pod_group)
    if group is None:
        return (
            f"PodGroup {worker_group.pod_group} does not exist, and Volcano places no pod whose PodGroup it does not "
            f"know: make stop-stage STAGE={worker_group.name}, then deploy the stage again"
        )
    said = Counter(filter(None, (_scheduling_message(pod) for pod in pods)))
    parts = [*_queue_messages(api, group), *_counted(said), _newest_message(group)]
    unknown = f"Volcano has not handled them yet (PodGroup phase {group.get('status', {}).get('phase', 'none')})"
    return "; ".join(dict.fromkeys(filter(None, parts))) or unknown


def _queue_messages(api: Api, group: Object) -> list[str]:
    """Messages about a full queue, which Volcano writes as events of the PodGroup and not as its conditions."""
    if group.get("status", {}).get("phase") != "Pending":
        return []
    return sorted({each["message"] for each in _events_of(api, group) if each["message"].startswith("queue ")})


def _scheduling_message(pod: Object) -> str:
    for condition in conditions_of(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""


def _newest_message(group: Object) -> str:
    """The newest condition of a PodGroup, if it says Unschedulable. Volcano leaves older conditions at True."""
    newest = max(conditions_of(group), key=lambda each: str(each.get("lastTransitionTime", "")), default=None)
    return str(newest.get("message", "")) if newest and newest["type"] == "Unschedulable" else ""


def statuses_of(pod: Object) -> list[Object]:
    """The statuses of a pod's containers, in the order in which they run."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def explain_start(api: Api, pod: Object) -> str:
    """Explain in one sentence what a pod that has not started waits for, such as the pull of an image."""
    for container in statuses_of(pod):
        name, state = container["name"], container.get("state") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason", "") not in PASSING:
            return f"{name} waits: {waiting['reason']} ({waiting.get('message', 'no message')})"
        if name == "wait-gcs-ready" and state.get("running"):
            return "waiting for the Ray head"
        ended = (container.get("lastState") or {}).get("terminated")
        if ended and not container.get("ready"):
            return f"{name} ended with exit code {ended['exitCode']} ({ended.get('reason', '')}) and restarts"
    events = _events_of(api, pod)
    for container in statuses_of(pod):
        name, waiting = container["name"], (container.get("state") or {}).get("waiting")
        said = {each["reason"] for each in events if f"{{{name}}}" in each["involvedObject"].get("fieldPath", "")}
        if waiting and "Pulling" in said and not said & {"Pulled", "Failed"}:
            return f"pulling {image_in(pod, name)}"
    return _newest_warning(events) or "starting"


def image_in(pod: Object, container: str) -> str:
    """The image of one of a pod's containers."""
    containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    return next(str(each["image"]) for each in containers if each["name"] == container)


def newest_event(api: Api, thing: Object) -> str:
    """The newest warning among the events of an object; empty when there is none."""
    return _newest_warning(_events_of(api, thing))


def _events_of(api: Api, thing: Object) -> list[Object]:
    return api.find_all("Event", fields=f"involvedObject.uid={thing['metadata']['uid']}")


def _newest_warning(events: list[Object]) -> str:
    telling = [each for each in events if each.get("type") == "Warning" or each.get("reason") in TELLING_EVENTS]
    newest = max(telling, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""), default=None)
    return f"{newest['reason']}: {newest['message']}" if newest else ""


def _counted(reasons: Counter[str]) -> Iterable[str]:
    return (f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.items())


DEFAULT_SCHEDULER = "default-scheduler"  # the API server writes it into a pod that names none
POD_GROUP = f"ray-{CLUSTER}-pg"
"""The PodGroup that an operator with Volcano's integration makes for the whole RayCluster."""


def explain_batch_scheduler(api: Api, head_pod: Object) -> str:
    """Explain that the operator has a batch scheduler of its own; empty where it has none.

    With the integration of Volcano the operator makes a PodGroup for the RayCluster. With every integration (Volcano,
    YuniKorn, KAI, scheduler-plugins) it gives the head another scheduler than `head_pod` of the manifests has.
    """
    wanted = head_pod.get("schedulerName") or DEFAULT_SCHEDULER
    given = sorted({pod["spec"].get("schedulerName") or DEFAULT_SCHEDULER for pod in heads_of(api)} - {wanted})
    if given:
        sign = f"it gave the head to the scheduler {given[0]}"
    elif api.find("PodGroup", POD_GROUP):
        sign = f"it made PodGroup {POD_GROUP}"
    else:
        return ""
    return (
        f"the KubeRay operator runs with its own batch scheduler ({sign}): a RayJob on this cluster would stay "
        f"Initializing for ever. Start the operator without one (Helm: batchScheduler.name unset), or let it watch "
        f"other namespaces and run a second operator for {api.namespace} (docs/operations/existing-cluster.md), then: "
        f"make cluster-down cluster-up"
    )
