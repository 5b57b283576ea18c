"""The Kubernetes API as a dictionary: what the deploy tool's own decisions are tried on, without a cluster.

It keeps objects, versions and conflicts as an API server does; nothing in it acts by itself, so a test plays the
operator, the scheduler and the nodes.
"""

from __future__ import annotations

import copy
import itertools
import re
from datetime import UTC, datetime
from typing import Any

from k8s.objects.api import Conflict
from tests.k8s.rendered import Thing


class MemoryApi:
    """The calls of `k8s.objects.api.Api` that deployments make."""

    namespace = "millrace"
    server = "https://memory"

    def __init__(self, *objects: Thing) -> None:
        self._objects: dict[tuple[str, str], Thing] = {}
        self._versions = itertools.count(1)
        for each in objects:
            self.create(each)

    def find(self, kind: str, name: str) -> Thing | None:
        return copy.deepcopy(self._objects.get((kind, name)))

    def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
        objects = list(self._objects.items())  # another thread may create some meanwhile
        found = [each for (its_kind, _), each in objects if its_kind == kind and not fields]
        return copy.deepcopy([each for each in found if _fits(selector, each["metadata"].get("labels") or {})])

    def create(self, body: Thing) -> Thing:
        key = (body["kind"], body["metadata"]["name"])
        if key in self._objects:
            raise Conflict(f"{key} exists")
        version = str(next(self._versions))
        made = copy.deepcopy(body)
        made["metadata"] = {"uid": f"uid-{version}", "creationTimestamp": datetime.now(UTC).isoformat()} | made[
            "metadata"
        ]
        self._objects[key] = made
        return self._changed(key, made)

    def apply(self, body: Thing) -> Thing:
        is_there = (body["kind"], body["metadata"]["name"]) in self._objects
        return self.merge(body["kind"], body["metadata"]["name"], body) if is_there else self.create(body)

    def merge(self, kind: str, name: str, patch: Thing) -> Thing:
        self._require_version((kind, name), patch.get("metadata", {}))
        return self._changed((kind, name), _merged(self._objects[kind, name], patch))

    def delete(self, kind: str, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        """Delete an object at once. A pod is Terminating until it is deleted with a grace of 0 s."""
        there = self._objects.get((kind, name))
        if there is None or uid not in (None, there["metadata"]["uid"]):
            return
        if kind == "Pod" and grace_seconds != 0:
            there["metadata"]["deletionTimestamp"] = "now"
        else:
            del self._objects[kind, name]

    def names(self, kind: str) -> list[str]:
        return sorted(name for its_kind, name in self._objects if its_kind == kind)

    def _changed(self, key: tuple[str, str], made: Thing) -> Thing:
        made["metadata"]["resourceVersion"] = str(next(self._versions))
        self._objects[key] = made
        return copy.deepcopy(made)

    def _require_version(self, key: tuple[str, str], metadata: Thing) -> None:
        there = self._objects[key]["metadata"]
        for field in ("uid", "resourceVersion"):
            if metadata.get(field, there[field]) != there[field]:
                raise Conflict(f"{key}: {field} is {there[field]}")


def _fits(selector: str, labels: dict[str, str]) -> bool:
    wanted: dict[str, list[str]] = {}
    for key, values in re.findall(r"([\w./-]+) in \(([^)]*)\)", selector):
        wanted[key] = values.split(",")
    for key, value in re.findall(r"([\w./-]+)=([\w.-]+)", selector):
        wanted[key] = [value]
    return all(labels.get(key) in values for key, values in wanted.items())


def _merged(there: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7396."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
