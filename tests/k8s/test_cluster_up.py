"""`cluster-up` changes nothing under a stage, finds network policies that nothing enforces, and gives the root away."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k8s.client import network_probe, overlay
from k8s.client.network_probe import CLOSED, OPEN, require_network_policies
from k8s.client.overlay import cluster_up
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError
from tests.containers import IMAGE_USER
from tests.k8s.builders import deployment_of
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, cluster_of, containers_of, of_kind

HEAD = "millrace/head@sha256:" + "1" * 64
NEXT_HEAD = "millrace/head@sha256:" + "2" * 64


class Server(MemoryApi):
    """Keeps what is applied. Its RayCluster is up."""

    def __init__(self, cluster: Thing, *objects: Thing) -> None:
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        labels = {"ray.io/cluster": "millrace", "ray.io/node-type": "head"}
        spec = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        head = {"kind": "Pod", "metadata": {"name": "head", "labels": labels}, "spec": spec, "status": ready}
        super().__init__(cluster, head, *objects)
        self.applied: list[str] = []

    def within(self, namespace: str) -> Server:
        return self

    def apply(self, body: Thing, is_trial: bool = False) -> Thing:
        if not is_trial:
            self.applied.append(body["kind"])
        return copy.deepcopy(body)


def up(monkeypatch: pytest.MonkeyPatch, server: Server, things: list[Thing], tag: str) -> int:
    monkeypatch.setattr(overlay, "render", lambda folder: things)
    monkeypatch.setattr(overlay, "require_network_policies", lambda *_: "seen on a real cluster")
    return cluster_up(server, Path("any"), tag)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "tag", "told"),
    [({}, NEXT_HEAD, f"-> {NEXT_HEAD}"), ({"rayVersion": "2.61.0"}, HEAD, "rayVersion")],
)
def test_a_head_is_changed_between_stages_and_not_under_one(
    overlays: dict[str, list[Thing]], monkeypatch: pytest.MonkeyPatch, change: Thing, tag: str, told: str
) -> None:
    """Whether its deployment goes on, or its pods were left up. tests/cluster holds that what one wrote stays."""
    things = copy.deepcopy(overlays["local"])
    live = copy.deepcopy(cluster_of(things))
    live["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = HEAD
    cluster_of(things)["spec"] |= change
    labels = {"millrace.dev/component": "trainer", "ray.io/node-type": "worker"}
    left_up: Thing = {"kind": "Pod", "metadata": {"name": "trainer", "labels": labels}}
    running = render_deploy_job(worker_group_of(live, "trainer"), deployment_of())
    for server in (Server(live, left_up), Server(live, running)):
        with pytest.raises(DeviceError, match=f"{told}(?s:.*)HEAD_TAG={HEAD}"):
            up(monkeypatch, server, things, tag)
        assert server.applied == []
    server = Server(live)
    assert up(monkeypatch, server, things, tag) == 0
    assert server.applied.count("RayCluster") == 1


HEAD_POD = {"metadata": {"name": "head"}, "spec": {"containers": [{"name": "ray-head"}]}}


def found(things: list[Thing], job: str, head: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(network_probe, "run_setup_job", lambda api, made: job)
    api: Any = SimpleNamespace(execute=lambda pod, container, command: f"{head}\n")
    return require_network_policies(api, of_kind(things, "Namespace")["millrace"], cluster_of(things), HEAD_POD)


@pytest.mark.parametrize(("job", "head"), [(OPEN, CLOSED), (CLOSED, OPEN), (OPEN, OPEN)])
def test_a_pod_that_gets_through_is_an_error_unless_the_overlay_says_so(
    overlays: dict[str, list[Thing]], job: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/cluster/test_smoke.py has pods that try."""
    with pytest.raises(DeviceError):
        found(overlays["eks"], job, head, monkeypatch)
    assert found(overlays["local"], job, head, monkeypatch)
    with pytest.raises(DeviceError):
        found(overlays["local"], "", "sh: no python", monkeypatch)


@pytest.mark.skipif(os.getuid() != 0, reason="gives folders away, as root does")
def test_folders_in_which_stages_make_others_are_theirs_and_a_second_run_changes_nothing(
    overlays: dict[str, list[Thing]], tmp_path: Path
) -> None:
    job = of_kind(overlays["eks"], "Job")["file-system-owner"]
    root = tmp_path / "fsx"
    (root / "checkpoint/run/id/shards").mkdir(parents=True)
    (root / ".lustre/fid").mkdir(parents=True)  # Lustre's own, which looks like a folder and takes no owner
    imported = root / "checkpoint/run/id/manifest.json"
    imported.write_text("{}")

    assert run_command(job, root) == f"{root}: 4 folders given to user {IMAGE_USER}"
    assert [folder.stat().st_uid for folder in (root, *(root / "checkpoint/run/id").parents[:2])] == [IMAGE_USER] * 3
    assert (root / ".lustre/fid").stat().st_uid == 0
    assert imported.stat().st_uid == 0  # it is read alone

    assert run_command(job, root) == f"{root}: 0 folders given to user {IMAGE_USER}"


def run_command(job: Thing, root: Path) -> str:
    [container] = containers_of(job["spec"]["template"])
    *shell, script = container["command"]
    done = subprocess.run(
        [*shell, script.replace("/fsx", str(root))], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()
