"""Short pods try images: one that can be pulled, one that cannot, one that answers and one that does not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from k8s.client import probe, pull_watch
from k8s.client.stage_preflight import Findings, check_in_pods
from k8s.objects.deployment import RECORD_VERSION, Deployment
from k8s.objects.names import node_pool_annotation
from k8s.objects.worker_group import WorkerGroup, worker_group_of
from tests.k8s.builders import deployment_of
from tests.k8s.rendered import Thing, cluster_of

PLATFORM = {"variant": "neuron", "python": "3.12.11", "ray": "2.60.0"}
HEAD: Thing = {"platform": PLATFORM, "records": [1, RECORD_VERSION]}
READY: Thing = {"platform": PLATFORM, "upstream": [], "problem": None}
IMAGE = deployment_of().image


def waiting(reason: str, message: str = "") -> Thing:
    return {"phase": "Pending", "containerStatuses": [{"name": "look", "state": {"waiting": said(reason, message)}}]}


def said(reason: str, message: str) -> Thing:
    return {"reason": reason, "message": message}


def ended(code: int, message: str = "") -> Thing:
    state = {"terminated": {"exitCode": code, "message": message}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "look", "state": state}]}


class Pods:
    """An API server whose Jobs' pods go through the states that are given, and say what is given."""

    def __init__(self, states: dict[str, list[Thing]], logs: dict[str, str], events: list[Thing] | None = None) -> None:
        self._states, self._logs, self._events = states, logs, events or []
        self.jobs: dict[str, Thing] = {}
        self.deleted: list[str] = []

    def create(self, body: Thing) -> Thing:
        self.jobs[body["metadata"]["name"]] = body
        return body | {"metadata": body["metadata"] | {"uid": "u"}}

    def delete(self, kind: str, name: str, uid: str) -> None:
        self.deleted.append(name)

    def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
        if kind == "Event":
            return self._events
        name = selector.removeprefix("job-name=")
        states = self._states["head" if name.startswith("preflight-head") else "stage"]
        status = states.pop(0) if len(states) > 1 else states[0]
        pod = self.jobs[name]["spec"]["template"]["spec"] | {"nodeName": "trn1-0"}
        return [{"metadata": {"name": name, "uid": "u"}, "spec": pod, "status": status}]

    def log(self, pod: str, container: str) -> Iterator[str]:
        text = self._logs["head" if pod.startswith("preflight-head") else "stage"]
        return iter([f"2026-01-01T00:00:00Z {line}" for line in text.splitlines()])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "POLL_SECONDS", 0.0)


@pytest.fixture
def trainer(overlays: dict[str, list[Thing]]) -> WorkerGroup:
    """The trainer's worker group with static nodes and an image that is pulled."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    cluster["metadata"]["annotations"].pop(node_pool_annotation("trainer"), None)
    return worker_group_of(cluster, "trainer")


def look(api: Pods, group: WorkerGroup, **changes: Any) -> Findings:
    deployment: Deployment = deployment_of(**changes)
    return check_in_pods(api, group, deployment, "name = 'x'")  # type: ignore[arg-type]


def answers(stage: Thing | str = READY, code: int = 0, head: Thing | str = HEAD, head_code: int = 0) -> Pods:
    logs = {"stage": stage, "head": head}
    texts = {name: text if isinstance(text, str) else f"hello\n{json.dumps(text)}" for name, text in logs.items()}
    return Pods({"stage": [ended(code)], "head": [ended(head_code)]}, texts)


def test_the_stage_is_asked_in_its_own_image_on_a_node_of_its_own(trainer: WorkerGroup) -> None:
    api = answers()
    seen = look(api, trainer)
    assert (seen.problems, seen.ray_version) == ([], "2.60.0")
    by_image = {job["spec"]["template"]["spec"]["containers"][0]["image"]: job for job in api.jobs.values()}
    assert set(by_image) == {IMAGE, trainer.head_pod["containers"][0]["image"]}
    pod = by_image[IMAGE]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "millrace.dev/pool": "trainium",
        "node.kubernetes.io/instance-type": "trn1.32xlarge",
    }
    assert pod["tolerations"] == trainer.pod["tolerations"]
    assert "aws.amazon.com/neuron" not in pod["containers"][0]["resources"]["requests"]
    assert sorted(api.deleted) == sorted(api.jobs)


def test_a_platform_that_does_not_fit_the_head_s(trainer: WorkerGroup) -> None:
    other = READY | {"platform": PLATFORM | {"ray": "2.59.0"}}
    [problem] = look(answers(other), trainer).problems
    assert "has ray 2.59.0, but the Ray head has 2.60.0" in problem.text
    assert look(answers(other), trainer, mode="isolated").problems == []
    assert look(answers(other), trainer, mode="isolated").ray_version == "2.59.0"


@pytest.mark.parametrize(
    ("head", "code", "expected"),
    [
        ({"platform": PLATFORM, "records": [1]}, 0, "version 1.*the head's image is older.*HEAD_TAG="),
        (
            {"platform": PLATFORM, "records": [8, 9]},
            0,
            "reads deployments of version 8 and 9.*this checkout is.*git pull",
        ),
        ("Segmentation fault", 139, "does not answer .exit code 139.: Segmentation fault"),
    ],
)
def test_a_head_of_another_version_is_told_before_anything_is_sent(
    trainer: WorkerGroup, head: Thing | str, code: int, expected: str
) -> None:
    [problem] = look(answers(head=head, head_code=code), trainer).problems
    assert problem.exit_code == 4
    assert re.search(expected, problem.text)


def test_an_image_that_cannot_be_pulled_is_named(trainer: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    api = answers()
    api._states["stage"] = [
        waiting("ErrImagePull", "manifest unknown"),
        waiting("ImagePullBackOff", "manifest unknown"),
    ]
    monkeypatch.setattr(pull_watch, "PULL_PATIENCE_SECONDS", 0.05)
    [problem] = look(api, trainer).problems
    assert problem.exit_code == 4
    assert f"image {IMAGE} cannot be pulled on trn1-0" in problem.text
    assert "manifest unknown" in problem.text
    assert "make images PUSH=" in problem.text


@pytest.mark.parametrize(
    "states",
    [
        [waiting("ErrImagePull", "no match for platform in manifest sha256:1: not found")],
        [ended(128, "exec /bin/sh: exec format error")],
    ],
)
def test_an_image_for_another_processor_is_told_at_once(trainer: WorkerGroup, states: list[Thing]) -> None:
    api = answers("")
    api._states["stage"] = states
    [problem] = look(api, trainer).problems
    assert problem.exit_code == 4
    assert "another processor than" in problem.text
