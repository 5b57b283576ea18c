"""A Job whose pod runs once, within a time limit, and that Kubernetes deletes some time after its end."""

from __future__ import annotations

from k8s.objects.api import Object


def render_short_job(
    name: str, labels: dict[str, str], pod: Object, *, limit_seconds: int, kept_seconds: int, tries: int = 0
) -> Object:
    """The Job of a pod with these labels. `tries` is the number of further pods after one that failed."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": tries,
            "activeDeadlineSeconds": limit_seconds,
            "ttlSecondsAfterFinished": kept_seconds,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
