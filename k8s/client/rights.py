"""The rights of a person who deploys: what the client's calls need. `k8s/base/people.yaml` grants them to a group.

Preflight asks the API server for each, before a deployment or its end would fail for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from k8s.client.reaper_job import REAPER
from k8s.objects.names import CLUSTER, lease_name
from services.common.recipe.schema import STAGES


@dataclass(frozen=True)
class Right:
    verb: str
    group: str
    resource: str
    name: str = ""
    """Of the one object that it is about; empty: all."""


def _rights(group: str, resource: str, *verbs: str, name: str = "") -> tuple[Right, ...]:
    return tuple(Right(verb, group, resource, name) for verb in verbs)


IN_THE_NAMESPACE = (
    *_rights("batch", "jobs", "get", "list", "create", "patch", "delete"),
    *_rights("", "configmaps", "get", "list", "create", "delete"),
    *_rights("", "pods", "get", "list", "delete"),
    *_rights("", "pods/log", "get", "list"),
    *_rights("", "events", "get", "list"),
    *_rights("", "serviceaccounts", "get", "list"),
    *_rights("", "persistentvolumeclaims", "get", "list"),
    *_rights("", "secrets", "get", name=CLUSTER),
    *_rights("ray.io", "rayclusters", "get", "list"),
    *_rights("ray.io", "rayclusters", "patch", name=CLUSTER),
    *_rights("ray.io", "rayjobs", "get", "list", "delete"),
    *_rights("scheduling.volcano.sh", "podgroups", "get", "list", "delete"),
    *_rights("coordination.k8s.io", "leases", "get"),
    *(
        right
        for stage in STAGES
        for right in _rights("coordination.k8s.io", "leases", "delete", name=lease_name(stage))
    ),
    *_rights("batch", "cronjobs", "get", name=REAPER),
)
IN_THE_CLUSTER = (
    *_rights("", "nodes", "get", "list"),
    *_rights("scheduling.volcano.sh", "queues", "get", "list"),
    *_rights("scheduling.k8s.io", "priorityclasses", "get", "list"),
)
TO_LOOK_INSIDE = tuple(
    right for resource in ("pods/exec", "pods/portforward") for right in _rights("", resource, "get", "create")
)
"""Of a person at a terminal (docs/operations); no call of the client needs them."""
TO_ASK = (
    *_rights("authorization.k8s.io", "selfsubjectaccessreviews", "create"),
    *_rights("authorization.k8s.io", "subjectaccessreviews", "create"),
)
