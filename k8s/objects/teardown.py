"""The teardown of a stage. Its deploy Job does it; the reaper or a person does it where there is no Job any more."""

from __future__ import annotations

from k8s.objects.api import Api
from k8s.objects.names import CLUSTER, STAGE_LABEL
from k8s.objects.placement import pods_of
from k8s.objects.rayjob import has_ended, rayjobs_of
from k8s.objects.worker_group import scale_down, worker_group_of


def delete_rayjobs(api: Api, stage: str) -> int:
    """Delete the stage's RayJobs; the operator stops what still runs of them. The number that is left."""
    jobs = rayjobs_of(api, stage)
    for job in jobs:
        api.delete("RayJob", job["metadata"]["name"])
    return len(jobs)


def stop_rayjobs(api: Api, stage: str, ending: frozenset[str] = frozenset()) -> int:
    """Delete those that have not ended, but for `ending`, of which Ray says that they have. The number that is left.

    One that has ended stays for `kubectl get rayjobs` until the stage is deployed again: nothing starts it anew.
    """
    running = [job for job in rayjobs_of(api, stage) if not has_ended(job)]
    for job in running:
        if job["metadata"]["name"] not in ending:
            api.delete("RayJob", job["metadata"]["name"])
    return len(running)


def release_pods(api: Api, stage: str) -> int:
    """Scale the group to 0 and, once its pods are gone, delete the gang. The number of pods that are left.

    Also where somebody deleted the RayCluster, whose pods go with it.
    """
    cluster = api.find("RayCluster", CLUSTER)
    if cluster:
        scale_down(api, worker_group_of(cluster, stage))
    left = len(pods_of(api, stage))
    if left == 0:
        for group in api.find_all("PodGroup", f"{STAGE_LABEL}={stage}"):
            api.delete("PodGroup", group["metadata"]["name"])
    return left
