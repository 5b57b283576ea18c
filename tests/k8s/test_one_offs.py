"""A one-off: its Job, its image and recipe, refusals before anything is created, and how it is followed to its end."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from deploy.client.one_off_request import OneOffRequest
from k8s.client import deployment_watch, kuberay_one_off
from k8s.client.kuberay_one_off import run_one_off
from k8s.objects.deploy_job import render_deploy_job, render_recipe_config_map
from k8s.objects.names import GOOD_IMAGES, NODE_POOL, PREFLIGHT_ANNOTATION, stage_annotation
from k8s.objects.one_off_job import cpu_group_of, render_one_off_job
from k8s.objects.record import record_of
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError, LimitError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.testing.recipes import recipe_text
from tests.deploy.batch.builders import one_off_request as ask
from tests.k8s.builders import DIGEST, deployment_of, one_off_of, pod
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, cluster_of
from tests.polling import Script, script_polls

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


def run(api: Cluster, request: OneOffRequest, manifests: io.StringIO | None = None) -> int:
    return run_one_off(api, request, manifests)  # type: ignore[arg-type]


@pytest.fixture
def api(overlays: dict[str, list[Thing]]) -> Cluster:
    """A cluster whose nodes are simply there, with an image that a deployment gave the trainer."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    cluster["metadata"]["annotations"].pop(stage_annotation("tokenizer", NODE_POOL))
    cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]["image"] = IMAGE
    return Cluster(cluster)


@pytest.fixture
def pooled(api: Cluster) -> Cluster:
    annotations = {stage_annotation("tokenizer", NODE_POOL): "millrace/cpu"}
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": annotations}})
    return api


@pytest.fixture
def while_waiting(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Changes the cluster by one step at each poll, and fails at a poll without a step left."""
    monkeypatch.setattr(deployment_watch, "POLL_SECONDS", 0.01)
    return script_polls(monkeypatch)


def test_memory_brings_its_share_of_a_node(overlays: dict[str, list[Thing]]) -> None:
    cluster = cluster_of(overlays["eks"])
    group, cpu_group = worker_group_of(cluster, "trainer"), cpu_group_of(cluster)
    job = render_one_off_job(group, cpu_group, one_off_of(memory_gib=28))  # a quarter
    amounts = {"cpu": "7500m", "memory": str(28 * 2**30), "ephemeral-storage": str(25 * 2**30)}
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    for wrong in (0, 113):
        with pytest.raises(LimitError, match=f"MEMORY={wrong}: .*112 GiB"):
            render_one_off_job(group, cpu_group, one_off_of(memory_gib=wrong))


def test_the_image_is_that_of_the_newest_deployment_or_the_newest_good_one(
    api: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def image_of_the_newest(**changes: Any) -> str:
        run(api, ask(is_followed=False, **changes))
        return str(api.sent[-1]["spec"]["template"]["spec"]["containers"][0]["image"])

    assert image_of_the_newest() == IMAGE
    other = f"sha256:{'1' * 64}"
    assert image_of_the_newest(tag=other) == f"millrace/trainer@{other}"
    cluster = api.find("RayCluster", "millrace")
    assert cluster
    cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]["image"] = "millrace/trainer:unset"
    api.merge("RayCluster", "millrace", {"spec": cluster["spec"]})
    good = json.dumps(["millrace/trainer@sha256:a", "millrace/trainer@sha256:b"])
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": {stage_annotation("trainer", GOOD_IMAGES): good}}})
    assert image_of_the_newest() == "millrace/trainer@sha256:b"
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": {stage_annotation("trainer", GOOD_IMAGES): None}}})
    monkeypatch.setattr(kuberay_one_off, "choose_image", lambda api, stage, *rest: f"{stage} of the working tree")
    assert image_of_the_newest() == "trainer of the working tree"


def recipe_of(job: Thing) -> str:
    variables = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    return unpack_recipe(variables[RECIPE_VARIABLE]).decode() if variables.get(RECIPE_VARIABLE) else ""


def test_the_recipe_is_that_of_the_newest_deployment_with_what_it_changed(api: Cluster) -> None:
    """A one-off takes the overrides of the newest deployment, so that it is about the run that these named."""
    text = recipe_text(name="deployed")
    deployment = replace(
        deployment_of(), arguments=("--optimizer.learning_rate=0.1", "--corpus=/fsx/c", "--train.seed=1")
    )
    api.create(render_recipe_config_map("trainer", text, deployment.recipe_digest))
    group = worker_group_of(api.find("RayCluster", "millrace") or {}, "trainer")
    job = render_deploy_job(group, deployment)
    job["metadata"]["annotations"][PREFLIGHT_ANNOTATION] = "{}"
    accepted = record_of(api.create(job))
    run(api, ask("import", "--from", "hf", "--train.seed=2", recipe=None, is_followed=False))
    sent = api.sent[-1]
    words = sent["spec"]["template"]["spec"]["containers"][0]["args"]
    overrides = ["--optimizer.learning_rate=0.1", "--train.seed=1"]
    assert words[words.index("--") + 1 :] == ["import", *overrides, "--from", "hf", "--train.seed=2"]
    assert recipe_of(sent) == text
    run(api, ask("plan", is_followed=False))
    assert recipe_of(api.sent[-1]) == recipe_text(), "RECIPE= names another"
    api.delete("Job", "deploy-trainer")
    refused = replace(deployment, recipe_digest="1" * 64)
    api.create(render_deploy_job(group, refused, accepted.deployment))
    run(api, ask("plan", recipe=None, is_followed=False))
    assert recipe_of(api.sent[-1]) == text, "that of a deployment which its image has not accepted does not count"
    api.delete("Job", "deploy-trainer")
    run(api, ask("plan", recipe=None, is_followed=False))
    assert 'name = "llama2-7b-trn1"' in recipe_of(api.sent[-1]), "the overlay's"
    run(api, ask("artifacts", "list", ".", recipe=None, is_followed=False))
    assert recipe_of(api.sent[-1]) == ""


def test_a_dry_run_shows_it_and_creates_nothing(pooled: Cluster) -> None:
    file = io.StringIO()
    assert run(pooled, ask(is_dry_run=True), file) == 0
    documents = list(yaml.safe_load_all(file.getvalue()))
    assert [each["metadata"]["name"].rpartition("-")[0] for each in documents] == [
        "one-off-trainer",
        "one-off-nodes-trainer",
    ]
    assert pooled.sent == []


@pytest.mark.parametrize(
    ("code", "reason", "expected", "said"),
    [
        (0, "Completed", 0, ""),
        (3, "Error", 3, ""),
        (75, "Error", 75, ""),
        (137, "OOMKilled", 4, "112Gi (MEMORY=)"),
        (137, "Error", 75, "(Error, exit code 137)"),
    ],
)
def test_it_is_followed_to_its_end_and_then_nothing_of_it_is_left(
    api: Cluster,
    while_waiting: Script,
    capsys: pytest.CaptureFixture[str],
    code: int,
    reason: str,
    expected: int,
    said: str,
) -> None:
    while_waiting(api.begin_pod, lambda: api.end_pod(code, reason, "tokens 5", "loss 3.2"))
    assert run(api, ask()) == expected
    told = capsys.readouterr().out
    assert "$9.66" in told
    assert told.count("tokens 5\nloss 3.2\n") == 1
    assert said in told
    assert api.names("Job") == []


def test_one_that_takes_too_long_or_is_lost_is_typed_again(api: Cluster, while_waiting: Script) -> None:
    def lose() -> None:
        api.delete("Pod", api.names("Pod")[0], grace_seconds=0)
        api.end_job("Failed")

    while_waiting(api.begin_pod, lose)
    assert run(api, ask()) == 75
    while_waiting(api.begin_pod, lambda: api.end_job("Failed", "DeadlineExceeded"))
    assert run(api, ask(hours=0.5)) == 75


def test_a_refusal_of_the_api_server_ends_the_client_and_not_the_one_off(
    api: Cluster, while_waiting: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(kind: str, name: str) -> None:
        raise DeviceError("403")

    while_waiting(api.begin_pod, lambda: monkeypatch.setattr(api, "find", refuse))
    assert exit_code_of(lambda: run(api, ask())) == 4
    assert len(api.one_offs) == 1


def test_a_node_that_does_not_come_ends_it(
    pooled: Cluster, while_waiting: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Job that adds nodes has ended, because EKS refuses them. Its output says why."""

    def refuse() -> None:
        [name] = [each for each in pooled.names("Job") if each.startswith("one-off-nodes-")]
        pooled.create(pod(f"{name}-x", component="one-off-nodes", phase="Succeeded"))
        pooled.merge("Pod", f"{name}-x", {"metadata": {"labels": {"job-name": name}}})
        pooled.lines.append("nodes: AccessDeniedException")
        pooled.merge("Job", name, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})

    while_waiting(lambda: pooled.begin_pod(phase="Pending"), refuse)
    assert exit_code_of(lambda: run(pooled, ask())) == 4
    assert "AccessDeniedException" in capsys.readouterr().out
    assert pooled.one_offs == []


def test_one_that_does_not_begin_in_time_is_deleted(
    api: Cluster, while_waiting: Script, capsys: pytest.CaptureFixture[str], clock: Any
) -> None:
    while_waiting(
        lambda: api.begin_pod(phase="Pending"), lambda: setattr(clock, "now", clock.now + 1_801), lambda: None
    )
    assert exit_code_of(lambda: run(api, ask())) == 75
    assert "WAIT=" in capsys.readouterr().err
    assert api.one_offs == []
