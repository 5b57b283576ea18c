"""The conditions in the status of a Kubernetes object."""

from __future__ import annotations

from k8s.objects.api import Object


def conditions_of(thing: Object) -> list[Object]:
    return (thing.get("status") or {}).get("conditions") or []


def has_condition(thing: Object, *types: str) -> bool:
    """Whether a condition of one of these types is True."""
    return any(each["type"] in types and each["status"] == "True" for each in conditions_of(thing))


def is_pod_over(pod: Object) -> bool:
    """Whether a pod's containers have ended, or will never start."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_job_over(job: Object) -> bool:
    """Whether a Job of Kubernetes has ended, well or badly."""
    return has_condition(job, "Complete", "Failed")
