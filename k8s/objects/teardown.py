"""The teardown of a stage, which its deploy Job does, or the reaper or a person where no deploy Job is left."""

from __future__ import annotations

from k8s.objects.api import Api, Object, is_pod_over
from k8s.objects.attempt import has_ended, rayjobs_of
from k8s.objects.names import CLUSTER, COMPONENT_LABEL, STAGE_LABEL
from k8s.objects.placement import pods_of
from k8s.objects.worker_group import scale_down, worker_group_of


def deploy_pods_of(api: Api, stage: str) -> list[Object]:
    """Pods of the stage's deploy Jobs that have not ended, the oldest first, which alone changes the stage.

    A pod that was deleted by force, as on a lost node, cannot: the API server refuses the token of a pod that is gone.
    """
    pods = api.find_all("Pod", f"{COMPONENT_LABEL}=deploy,{STAGE_LABEL}={stage}")
    pods.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["uid"]))
    return [pod for pod in pods if not is_pod_over(pod)]


def take_down(api: Api, stage: str) -> int:
    """Stop the stage's RayJobs, then remove its pods. Returns how many of either are left."""
    return stop_rayjobs(api, stage) or release_pods(api, stage)


def stop_rayjobs(api: Api, stage: str) -> int:
    """Delete the RayJobs that have not ended, whose jobs the operator stops. Returns how many had not.

    An ended RayJob stays for `kubectl get rayjobs` until the next deployment of the stage; nothing starts it again.
    """
    running = [job for job in rayjobs_of(api, stage) if not has_ended(job)]
    for job in running:
        api.delete("RayJob", job["metadata"]["name"])
    return len(running)


def release_pods(api: Api, stage: str) -> int:
    """Scale the worker group to 0 and, once its pods are gone, delete the PodGroup. Returns how many pods are left.

    Works without the RayCluster as well, whose pods go when somebody deletes it.
    """
    cluster = api.find("RayCluster", CLUSTER)
    if cluster:
        scale_down(api, worker_group_of(cluster, stage))
    left = len(pods_of(api, stage))
    if left == 0:
        for group in api.find_all("PodGroup", f"{STAGE_LABEL}={stage}"):
            api.delete("PodGroup", group["metadata"]["name"])
    return left
