"""A cluster in memory that runs the Job of a one-off as far as a test lets it."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

from deploy.client.one_off_request import OneOffRequest
from k8s.client.kuberay_one_off import run_one_off
from k8s.objects.one_off_job import OneOff
from services.common.recipe.schema import Stage
from tests.k8s.builders import DIGEST
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing

POOL = "millrace/cpu"


IMAGE = f"millrace/trainer@sha256:{DIGEST}"


NAME = re.compile(r"one-off-trainer-[0-9a-f]{6}")


class Cluster(MemoryApi):
    """An API server, with a kubelet that does what a test lets it."""

    def __init__(self, cluster: Thing) -> None:
        super().__init__(copy.deepcopy(cluster))
        self.lines: list[str] = []
        self.sent: list[Thing] = []

    def create(self, body: Thing) -> Thing:
        if body["kind"] == "Job":
            self.sent.append(body)
        return super().create(body)

    def log(self, pod: str, container: str) -> Iterator[str]:
        return iter([f"2026-01-01T00:00:{number:012.9f}Z {line}" for number, line in enumerate(self.lines)])

    @property
    def one_offs(self) -> list[str]:
        return [name for name in self.names("Job") if NAME.fullmatch(name)]

    def begin_pod(self, **status: Any) -> None:
        """The pod of the one-off is placed, or waits."""
        [name] = self.one_offs
        job = self.find("Job", name)
        assert job
        metadata = {"name": f"{name}-x", "labels": {"job-name": name}}
        spec = job["spec"]["template"]["spec"] | {"nodeName": "cpu-0"}
        self.create({"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"} | status})

    def end_pod(self, code: int, reason: str = "", *lines: str) -> None:
        self.lines += lines
        state = {"terminated": {"exitCode": code, "reason": reason}}
        statuses = [{"name": "one-off", "state": state}]
        for name in self.names("Pod"):
            self.merge(
                "Pod", name, {"status": {"phase": "Failed" if code else "Succeeded", "containerStatuses": statuses}}
            )
        self.end_job("Failed" if code else "Complete")

    def end_job(self, how: str, reason: str = "") -> None:
        [name] = self.one_offs
        condition = {"type": how, "status": "True", "reason": reason}
        self.merge("Job", name, {"status": {"conditions": [condition]}})


Ask = Callable[..., OneOffRequest]


def one_off_of(stage: Stage = "trainer", **changes: Any) -> OneOff:
    fields: dict[str, Any] = {
        "stage": stage,
        "id": "abc123",
        "digest": "0" * 16,
        "image": f"millrace/{stage}@sha256:{DIGEST}",
        "words": ("artifacts", "list", "a b"),
        "recipe": "packed",
        "seconds": 3_600,
        "user": "somebody",
    }
    return OneOff(**fields | changes)


def run(api: Cluster, request: OneOffRequest, manifests: io.StringIO | None = None) -> int:
    return run_one_off(api, request, manifests)  # type: ignore[arg-type]
