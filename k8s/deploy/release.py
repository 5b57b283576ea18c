"""Taking a stage down: by its deploy Job, or by a person where there is no Job any more."""

from __future__ import annotations

from k8s.deploy.api import Api, Object
from k8s.deploy.names import CLUSTER, STAGE_LABEL
from k8s.deploy.placement import pods_of
from k8s.deploy.stage import Stage, stage_of
from k8s.deploy.verdict import has_ended


def rayjobs_of(api: Api, stage: str) -> list[Object]:
    return api.find_all("RayJob", f"{STAGE_LABEL}={stage}")


def drop_rayjobs(api: Api, stage: str) -> int:
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
        scale_down(api, stage_of(cluster, stage))
    left = len(pods_of(api, stage))
    if left == 0:
        for group in api.find_all("PodGroup", f"{STAGE_LABEL}={stage}"):
            api.delete("PodGroup", group["metadata"]["name"])
    return left


def scale_down(api: Api, stage: Stage) -> None:
    if stage.replicas:
        replace_group(api, stage, stage.group | {"replicas": 0})


def replace_group(api: Api, stage: Stage, group: Object) -> None:
    """Write a worker group in one piece, if the RayCluster is still the one that was read.

    The list of groups has no key, so server-side apply cannot own one of them. Raises `Conflict`.
    """
    metadata = stage.cluster["metadata"]
    lock = {"resourceVersion": metadata["resourceVersion"]}
    patch = {"metadata": lock, "spec": {"workerGroupSpecs": groups_with(stage, group)}}
    api.merge("RayCluster", metadata["name"], patch)


def groups_with(stage: Stage, group: Object) -> list[Object]:
    """The RayCluster's worker groups, with this one in the place of the stage's."""
    groups = list(stage.cluster["spec"]["workerGroupSpecs"])
    groups[stage.index] = group
    return groups
