"""A subcommand of a stage on a cluster: what is sent, what is refused before, and how it is followed to its end."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.client.one_off import OneOffRequest
from k8s.client import one_off as one_off_module
from k8s.client import pull_watch, watch
from k8s.client.one_off import run_one_off
from k8s.client.status import describe_status
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.names import OUTCOME_ANNOTATION, good_images_annotation, node_pool_annotation
from k8s.objects.one_off_job import OneOff, cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.recipe import render_recipe_config_map
from k8s.objects.record import Outcome
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError, LimitError, MillraceError, RecipeError
from services.common.launch.batch.node import RECIPE_VARIABLE, unpack_recipe
from services.common.launch.brought_files import pack_file
from services.common.process.entry_point import exit_code_of
from services.common.process.subcommands import LABEL
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.recipes import recipe_text
from tests.k8s.builders import DIGEST, deployment_of
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import OVERLAYS, Thing, cluster_of
from tests.k8s.schemas import Kind, Schema, problems_of

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


Steps = Callable[..., None]
Ask = Callable[..., OneOffRequest]


@pytest.fixture
def trainer(overlays: dict[str, list[Thing]]) -> Thing:
    """The RayCluster of a cluster whose nodes are simply there, with an image that a deployment gave the trainer."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    cluster["metadata"]["annotations"].pop(node_pool_annotation("tokenizer"))
    cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]["image"] = IMAGE
    return cluster


@pytest.fixture
def api(trainer: Thing) -> Cluster:
    return Cluster(trainer)


@pytest.fixture
def pooled(api: Cluster) -> Cluster:
    annotations = {node_pool_annotation("tokenizer"): POOL}
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": annotations}})
    return api


@pytest.fixture(autouse=True)
def labels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the image, as its registry tells them."""
    told: dict[str, str] = {LABEL: "summary report export artifacts"}
    monkeypatch.setattr(one_off_module, "find_image_labels", lambda group, image: told)
    return told


@pytest.fixture
def while_waiting(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What happens in the cluster, one step a poll. Without a step left a poll is one too many."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)

    def script(*steps: Callable[[], object]) -> None:
        left = list(steps)

        def sleep(seconds: float) -> None:
            assert left, "it waits for ever"
            left.pop(0)()

        monkeypatch.setattr("time.sleep", sleep)

    script()
    return script


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text())

    def request(*words: str, stage: Stage = "trainer", **changes: Any) -> OneOffRequest:
        fields: dict[str, Any] = {"recipe": recipe, "folder": tmp_path / "home"}
        return OneOffRequest(stage, words or ("summary",), **fields | changes)

    return request


def one_off_of(stage: Stage = "trainer", **changes: Any) -> OneOff:
    fields: dict[str, Any] = {
        "stage": stage,
        "id": "abc123",
        "digest": "0" * 16,
        "image": f"millrace/{stage}@sha256:{DIGEST}",
        "words": ("artifacts", "list", "a b"),
        "bring": ("run/report.html",),
        "recipe": "packed",
        "seconds": 3_600,
        "user": "somebody",
    }
    return OneOff(**fields | changes)


def run(api: Cluster, request: OneOffRequest, manifests: io.StringIO | None = None) -> int:
    return run_one_off(api, request, manifests)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_both_jobs_fit_the_api(
    overlays: dict[str, list[Thing]], schemas: dict[Kind, Schema], overlay: str, stage: Stage
) -> None:
    cluster = cluster_of(overlays[overlay])
    group, cpu_group = worker_group_of(cluster, stage), cpu_group_of(cluster)
    for memory_gib in (None, 1):
        sent = render_one_off_job(group, cpu_group, one_off_of(stage, memory_gib=memory_gib))
        assert problems_of(sent, schemas) == []
    assert problems_of(render_one_off_nodes_job(cpu_group, one_off_of(stage)), schemas) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_one_off_is_the_stage_on_a_cpu_node_without_a_device(overlays: dict[str, list[Thing]], stage: Stage) -> None:
    cluster = cluster_of(overlays["eks"])
    group, cpu_group = worker_group_of(cluster, stage), cpu_group_of(cluster)
    job = render_one_off_job(group, cpu_group, one_off_of(stage))
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (stage, False)
    assert (pod["nodeSelector"], pod.get("tolerations", [])) == ({"millrace.dev/pool": "cpu"}, [])
    assert container["resources"] == cpu_group.container["resources"]
    assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert [*container["command"], *container["args"]] == [
        *("python", "-m", f"services.{stage}", "one-off", "--root", "/fsx"),
        *("--bring", "run/report.html", "--", "artifacts", "list", "a b"),
    ]
    assert {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]} == {
        "/fsx": None,
        "/scratch": None,
    }
    assert pod["securityContext"]["runAsUser"] == 10_001
    assert container["securityContext"]["readOnlyRootFilesystem"]
    secrets = [each["name"] for each in container["env"] if "valueFrom" in each]
    assert secrets == (["HF_TOKEN"] if stage == "tokenizer" else [])
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] == 3_600


def test_memory_brings_its_share_of_a_node(overlays: dict[str, list[Thing]]) -> None:
    cluster = cluster_of(overlays["eks"])
    group, cpu_group = worker_group_of(cluster, "trainer"), cpu_group_of(cluster)
    job = render_one_off_job(group, cpu_group, one_off_of(memory_gib=28))  # a quarter
    amounts = {"cpu": "7500m", "memory": str(28 * 2**30), "ephemeral-storage": str(25 * 2**30)}
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    for wrong in (0, 113):
        with pytest.raises(LimitError, match=f"MEMORY={wrong}: a one-off takes from 1 to 112 GiB"):
            render_one_off_job(group, cpu_group, one_off_of(memory_gib=wrong))


def test_what_holds_the_node_has_the_deployer_s_account_and_no_shared_file_system(
    overlays: dict[str, list[Thing]],
) -> None:
    job = render_one_off_nodes_job(cpu_group_of(cluster_of(overlays["eks"])), one_off_of())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert job["metadata"]["name"] == "one-off-nodes-trainer-abc123"
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("deployer", {"millrace.dev/pool": "core"})
    assert [*container["command"], *container["args"]] == [
        *("python", "-m", "k8s.controller.one_off_nodes"),
        "one-off-trainer-abc123",
    ]
    assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/scratch"]


@pytest.mark.parametrize(
    ("words", "changes", "error", "said"),
    [
        (("exprt",), {}, RecipeError, "Do you mean export"),
        (("train",), {}, RecipeError, "make deploy-stage STAGE=trainer"),
        (("plan",), {}, RecipeError, "'plan' is no subcommand of the trainer, which has summary"),
        (("summary",), {"memory_gib": 500}, LimitError, "MEMORY=500"),
        (("summary",), {"recipe": Path("absent.toml")}, RecipeError, "absent.toml"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_created(
    api: Cluster, ask: Ask, words: tuple[str, ...], changes: Thing, error: type[MillraceError], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(api, ask(*words, **changes))
    assert api.sent == []


def test_an_image_that_is_older_than_one_offs_is_named(api: Cluster, ask: Ask, labels: dict[str, str]) -> None:
    labels.clear()
    labels["millrace.python"] = "3.12.11"
    with pytest.raises(DeviceError, match=f"image {IMAGE} is older than stage-run"):
        run(api, ask())
    assert api.sent == []


@pytest.mark.parametrize(
    ("code", "reason", "expected", "said"),
    [
        (0, "Completed", 0, ""),
        (3, "Error", 3, ""),
        (75, "Error", 75, ""),
        (137, "OOMKilled", 4, "it was killed at the limit of its memory, 112Gi (MEMORY=)"),
        (137, "Error", 75, "it was killed (Error, exit code 137)"),
    ],
)
def test_it_is_followed_to_its_end_and_then_nothing_of_it_is_left(
    api: Cluster,
    ask: Ask,
    while_waiting: Steps,
    capsys: pytest.CaptureFixture[str],
    code: int,
    reason: str,
    expected: int,
    said: str,
) -> None:
    while_waiting(api.begin_pod, lambda: api.end_pod(code, reason, "tokens 5", "loss 3.2"))
    assert run(api, ask()) == expected
    told = capsys.readouterr().out
    assert "cost        m7i.8xlarge at $1.61 an hour: $9.66 at most, after 6 h (HOURS=)" in told
    assert "runs        trainer: summary\n" in told
    assert "takes       30 CPUs and 112Gi of memory on one node (MEMORY=)" in told
    assert told.count("tokens 5\nloss 3.2\n") == 1
    assert f"ended with exit code {expected}{f': {said}' if said else ''}\n" in told
    assert api.names("Job") == []


def test_one_that_takes_too_long_or_is_lost_is_typed_again(
    api: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose() -> None:
        api.delete("Pod", api.names("Pod")[0], grace_seconds=0)
        api.end_job("Failed")

    while_waiting(api.begin_pod, lose)
    assert run(api, ask()) == 75
    while_waiting(api.begin_pod, lambda: api.end_job("Failed", "DeadlineExceeded"))
    assert run(api, ask(hours=0.5)) == 75
    told = capsys.readouterr().out
    assert "its pod was lost with its node, or was evicted" in told
    assert "it did not end within 0.5 h, the wait for its node included (HOURS=)" in told


def test_what_it_brings_is_written_and_not_printed(
    api: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_bytes(b"<html>" * 10_000)
    lines = list(pack_file(tmp_path / "report.html", 0))
    while_waiting(api.begin_pod, lambda: api.end_pod(0, "", "/fsx/run/x/report.html", *lines))
    assert run(api, ask("report")) == 0
    told = capsys.readouterr().out
    assert f"brought     {tmp_path}/home/report.html (60,000 bytes)" in told
    assert "millrace-file" not in told
    assert (tmp_path / "home/report.html").read_bytes() == b"<html>" * 10_000


def test_a_file_that_does_not_come_whole_keeps_the_job(
    api: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(api.begin_pod, lambda: api.end_pod(0, "", "millrace-file 0/0/3 abcd"))
    assert exit_code_of(lambda: run(api, ask("report"))) == 75
    assert "file 1 " in capsys.readouterr().err
    assert len(api.one_offs) == 1, "the same command takes it up again"


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_it(pooled: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str]) -> None:
    while_waiting(pooled.begin_pod, interrupt)
    assert exit_code_of(lambda: run(pooled, ask())) == 130
    assert pooled.one_offs == []
    assert "is deleted: its pod gets SIGTERM" in capsys.readouterr().out
    [nodes_job] = pooled.names("Job")
    assert nodes_job.startswith("one-off-nodes-trainer-"), "it gives the node back, and ends by itself"


def test_the_same_of_the_same_person_is_followed_and_its_unseen_end_is_shown(
    api: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(api, ask(is_followed=False)) == 0
    [first] = api.one_offs
    assert f"{first} goes on: the same command without FOLLOW=0 shows it" in capsys.readouterr().out
    assert run(api, ask("export", is_followed=False)) == 0
    assert len(api.sent) == 2, "another command is another Job"
    monkeypatch.setattr("deploy.client.one_off.user_name", lambda: "somebody else")
    assert run(api, ask(is_followed=False)) == 0
    assert len(api.sent) == 3
    monkeypatch.undo()
    monkeypatch.setattr(one_off_module, "find_image_labels", lambda group, image: {})
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    for name in [each for each in api.one_offs if each != first]:
        api.delete("Job", name)
    api.begin_pod()
    api.end_pod(3, "Error", "it said this before")
    assert run(api, ask()) == 3
    told = capsys.readouterr().out
    assert re.search(rf"{first} of .* is just the same, and has ended, which nobody saw: following it", told)
    assert "it said this before\n" in told
    assert api.one_offs == []


def test_a_node_comes_for_it_from_the_group_of_cpu_nodes(
    pooled: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(pooled.begin_pod, lambda: pooled.end_pod(0))
    assert run(pooled, ask()) == 0
    assert f"nodes       node group {POOL}: one node comes for it and goes after it" in capsys.readouterr().out
    assert [job["metadata"]["labels"]["millrace.dev/component"] for job in pooled.sent] == ["one-off-nodes", "one-off"]


@pytest.mark.parametrize(
    ("patch", "code", "said"),
    [
        (
            {
                "metadata": {
                    "annotations": {OUTCOME_ANNOTATION: json.dumps(asdict(Outcome(75, "there is no capacity")))}
                }
            },
            75,
            "no node comes for one-off-trainer-.*there is no capacity",
        ),
        ({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, 4, "has no such program: update the head"),
    ],
)
def test_a_node_that_does_not_come_ends_it(
    pooled: Cluster,
    ask: Ask,
    while_waiting: Steps,
    capsys: pytest.CaptureFixture[str],
    patch: Thing,
    code: int,
    said: str,
) -> None:
    def refuse() -> None:
        [name] = [each for each in pooled.names("Job") if each.startswith("one-off-nodes-")]
        pooled.merge("Job", name, patch)

    while_waiting(lambda: pooled.begin_pod(phase="Pending"), refuse)
    assert exit_code_of(lambda: run(pooled, ask())) == code
    assert re.search(said, capsys.readouterr().err)
    assert pooled.one_offs == []


def test_one_that_does_not_begin_in_time_is_deleted(
    api: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str], clock: Any
) -> None:
    while_waiting(
        lambda: api.begin_pod(phase="Pending"), lambda: setattr(clock, "now", clock.now + 1_801), lambda: None
    )
    assert exit_code_of(lambda: run(api, ask())) == 75
    told = capsys.readouterr()
    assert "no node has the labels that tokenizer pods select (millrace.dev/pool=cpu)" in told.out
    assert "did not begin within 1800 s (WAIT=), and is deleted" in told.err
    assert api.one_offs == []


def test_an_image_that_cannot_be_pulled_ends_it(
    api: Cluster, ask: Ask, while_waiting: Steps, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_watch, "PULL_PATIENCE_SECONDS", -1.0)
    waiting = {"name": "one-off", "state": {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}}
    while_waiting(lambda: api.begin_pod(phase="Pending", containerStatuses=[waiting]))
    assert exit_code_of(lambda: run(api, ask())) == 4
    assert f"image {IMAGE} cannot be pulled on cpu-0" in capsys.readouterr().err
    assert api.one_offs == []


def test_a_pod_on_a_lost_node_is_removed_by_force(
    api: Cluster, ask: Ask, while_waiting: Steps, clock: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    while_waiting(
        api.begin_pod,
        lambda: api.delete("Pod", api.names("Pod")[0]),  # by the node lifecycle controller; kubelet does not answer
        lambda: setattr(clock, "now", clock.now + 121),
        lambda: api.end_job("Failed") if not api.names("Pod") else pytest.fail("the pod is still there"),
    )
    assert run(api, ask()) == 75


def test_the_image_is_that_of_the_newest_deployment_or_the_newest_good_one(
    api: Cluster, ask: Ask, monkeypatch: pytest.MonkeyPatch
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
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": {good_images_annotation("trainer"): good}}})
    assert image_of_the_newest() == "millrace/trainer@sha256:b"
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": {good_images_annotation("trainer"): None}}})
    monkeypatch.setattr(one_off_module, "choose_image", lambda api, stage, *rest: f"{stage} of the working tree")
    assert image_of_the_newest() == "trainer of the working tree"


def recipe_of(job: Thing) -> str:
    variables = {each["name"]: each.get("value") for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    return unpack_recipe(variables[RECIPE_VARIABLE]).decode() if variables.get(RECIPE_VARIABLE) else ""


def test_the_recipe_is_that_of_the_newest_deployment_with_what_it_changed(
    api: Cluster, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a run is found again which was deployed with other values than its recipe file has."""
    text = recipe_text(name="deployed")
    deployment = replace(
        deployment_of(), arguments=("--optimizer.learning_rate=0.1", "--corpus=/fsx/c", "--train.seed=1")
    )
    api.create(render_recipe_config_map("trainer", text, deployment.recipe_digest))
    job = render_deploy_job(worker_group_of(api.find("RayCluster", "millrace") or {}, "trainer"), deployment)
    api.create(job)
    run(api, ask("export", "--output", "hf", "--train.seed=2", recipe=None, is_followed=False))
    sent = api.sent[-1]
    words = sent["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--") + 1 :] == [
        *("export", "--optimizer.learning_rate=0.1", "--train.seed=1", "--output", "hf", "--train.seed=2")
    ]
    assert recipe_of(sent) == text
    told = "recipe      deployed, that of the trainer's newest deployment, with --optimizer.learning_rate=0.1"
    assert told in capsys.readouterr().out
    run(api, ask(is_followed=False))
    assert recipe_of(api.sent[-1]) == recipe_text(), "RECIPE= names another"
    api.delete("Job", "deploy-trainer")
    run(api, ask(recipe=None, is_followed=False))
    assert 'name = "llama2-7b-trn1"' in recipe_of(api.sent[-1]), "the overlay's"
    run(api, ask("artifacts", "list", ".", recipe=None, is_followed=False))
    assert recipe_of(api.sent[-1]) == ""


def test_a_dry_run_shows_it_and_creates_nothing(
    pooled: Cluster, ask: Ask, schemas: dict[Kind, Schema], capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.StringIO()
    assert run(pooled, ask(is_dry_run=True, bring=("run/x",)), file) == 0
    assert capsys.readouterr().out.endswith("brings      run/x\n\nDRY_RUN=1: nothing was changed\n")
    documents = list(yaml.safe_load_all(file.getvalue()))
    assert [problem for each in documents for problem in problems_of(each, schemas)] == []
    assert [each["metadata"]["name"].rpartition("-")[0] for each in documents] == [
        "one-off-nodes-trainer",
        "one-off-trainer",
    ]
    assert pooled.sent == []


def test_a_cluster_without_cpu_nodes_for_it_says_so(api: Cluster, ask: Ask) -> None:
    cluster = api.find("RayCluster", "millrace")
    assert cluster
    trainer_s = cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]["resources"]
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"] = trainer_s
    api.merge("RayCluster", "millrace", {"spec": cluster["spec"]})
    with pytest.raises(DeviceError, match=r"worker group tokenizer asks for aws.amazon.com/neuron"):
        run(api, ask())


def test_a_status_lists_them(api: Cluster, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert "one-offs" not in describe_status(api)  # type: ignore[arg-type]
    run(api, ask("export", "--output", "a b", is_followed=False))
    [name] = api.one_offs
    assert f"one-offs\n  {name}  goes on, since now: export --output 'a b'" in describe_status(api)  # type: ignore[arg-type]
