"""The client of a deployment without a cluster: the objects that it sends, and its use of the answers."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from deploy.client.instance_type import check_instance_type
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from k8s.client.deployment_plan import describe_plan, write_manifests
from k8s.client.deployment_watch import Watch
from k8s.client.kuberay_target import KubeRayTarget
from k8s.client.resolved_deployment import DEFAULT_RECIPE, resolve
from k8s.objects.attempt import render_isolated_rayjob, render_rayjob
from k8s.objects.capacity import check_nodes, check_queue, check_size
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import RECORD_VERSION, UnknownRecord
from k8s.objects.names import NODE_PRICE, stage_annotation
from k8s.objects.record import Outcome, record_of
from k8s.objects.worker_group import WorkerGroup, worker_group_of
from services.common.errors import RecipeError
from tests.k8s.builders import DIGEST, deployment_of
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import OVERLAYS, Thing, cluster_of

IMAGE = f"a/b@sha256:{DIGEST}"
"""An image that has a digest is looked up nowhere."""
TINY = read_requested_recipe(DEFAULT_RECIPE)
NO_API: Any = MemoryApi()


@pytest.fixture(scope="module")
def clusters(overlays: dict[str, list[Thing]]) -> dict[str, Thing]:
    """The RayCluster of each overlay."""
    return {name: cluster_of(things) for name, things in overlays.items()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--train.max_steps 5", "--section.key=value"),
        ("--root /tmp", "--root"),
        ("--dry-run", "DRY_RUN=1"),
    ],
)
def test_options_that_a_deployment_sets_itself_are_refused(arguments: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        DeployRequest("trainer", arguments=tuple(arguments.split()))


def test_a_deployment_that_names_no_recipe_takes_the_overlay_s(clusters: dict[str, Thing]) -> None:
    """The images of an overlay take its recipe; those for Neuron would refuse one for CPUs."""
    request = DeployRequest("trainer", tag=IMAGE)
    found = {name: resolve(NO_API, worker_group_of(cluster, "trainer"), request) for name, cluster in clusters.items()}

    assert {name: recipe.outline.name for name, (_, recipe) in found.items()} == {
        "local": "tiny-cpu",
        "eks": "llama2-7b-trn1",
    }
    for name, (deployment, recipe) in found.items():
        group = worker_group_of(clusters[name], "trainer")
        assert recipe.outline.parallel.device == {"cpu": "cpu", "neuron": "xla"}[group.variant]
        assert check_instance_type("trainer", recipe.outline, group.instance_type, "CHANGE") == ""
        assert deployment.nodes <= group.spec["maxReplicas"]


def test_nodes_decide_the_data_parallel_degree(trainer: WorkerGroup) -> None:
    request = DeployRequest("trainer", TINY, IMAGE, nodes=1)
    deployment, recipe = resolve(NO_API, trainer, request)
    assert recipe.outline.parallel.data_parallel_size == 1
    assert deployment.arguments == ("--parallel.data_parallel_size=1",)
    assert deployment.drain_seconds == 300
    trainer.cluster["metadata"]["annotations"]["millrace.dev/trainer-checkpoint-seconds"] = "200.5"
    assert resolve(NO_API, trainer, request)[0].drain_seconds == 602
    with pytest.raises(RecipeError, match="cannot be shared"):
        resolve(NO_API, trainer, replace(request, tag="", nodes=3))


def test_nodes_hold_whole_models(trainer: WorkerGroup) -> None:
    """A degree of the command line counts as one of the recipe's: models of 2 workers, of which a node has one."""
    sizes = ("--parallel.tensor_parallel_size=2", "--parallel.data_parallel_size=2", "--batch.global_batch_size=16")
    split = (*sizes, "--cluster.min_nodes=1")
    request = DeployRequest("trainer", TINY, IMAGE, arguments=split)
    of_recipe = resolve(NO_API, trainer, request)[0]
    assert (of_recipe.nodes, of_recipe.fewer_nodes) == (4, (2,))
    assert of_recipe.arguments_for(2)[-1] == "--parallel.data_parallel_size=1"

    deployment, recipe = resolve(NO_API, trainer, replace(request, nodes=8))
    assert deployment.arguments == (*split, "--parallel.data_parallel_size=4")
    assert deployment.tensor_parallel_size == 2
    said = describe_plan(trainer, deployment, recipe.outline)
    assert "8 pods x 1 workers: data-parallel degree 4 x tensor-parallel degree 2" in said

    isolated = resolve(NO_API, trainer, replace(request, nodes=2, mode="isolated"))[0]
    job = render_isolated_rayjob(trainer, isolated, 1)
    assert job["spec"]["entrypoint"].endswith("--parallel.data_parallel_size=1")
    with pytest.raises(RecipeError, match=r"NODES=3: 3 workers .*multiple of 2"):
        resolve(NO_API, trainer, replace(request, nodes=3))


@pytest.mark.parametrize("change", [{"version": RECORD_VERSION + 1}, {"hosts": 2}])
def test_a_client_says_that_another_version_deployed(trainer: WorkerGroup, change: dict[str, int]) -> None:
    made = render_deploy_job(trainer, deployment_of())
    fields = json.loads(deployment_of().to_json()) | change
    made["spec"]["template"]["spec"]["containers"][0]["args"] = [json.dumps(fields)]
    with pytest.raises(UnknownRecord, match=r"Job deploy-trainer: .*git pull") as raised:
        record_of(made)
    assert raised.value.exit_code == 4


def node(name: str, changes: Thing | None = None) -> Thing:
    made: Thing = {
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"node.kubernetes.io/instance-type": "trn1.32xlarge", "millrace.dev/pool": "trainium"},
        },
        "spec": {"taints": [{"key": "aws.amazon.com/neuron", "value": "true", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {
                "cpu": "127",
                "memory": "500Gi",
                "ephemeral-storage": "1000Gi",
                "hugepages-2Mi": "10256Mi",
                "aws.amazon.com/neuron": "16",
                "vpc.amazonaws.com/efa": "8",
            }
        },
    }
    return made | (changes or {})


@pytest.fixture
def trainer(clusters: dict[str, Thing]) -> WorkerGroup:
    return worker_group_of(copy.deepcopy(clusters["eks"]), "trainer")


def test_room_on_nodes(trainer: WorkerGroup) -> None:
    def check(*nodes: Thing, pods: int = 2) -> str:
        api: Any = MemoryApi(*nodes)
        return check_nodes(api, trainer, pods)

    assert check(node("a"), node("b")) == ""
    assert "room for 1 of 2" in check(node("a"))
    other = {"metadata": {"name": "a", "labels": {"node.kubernetes.io/instance-type": "m7i.large"}}}
    assert "0 nodes have the labels that trainer pods select" in check(node("a", other))
    tainted = {"spec": {"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}}
    assert "maintenance:NoSchedule" in check(node("a", tainted), node("b", tainted))
    without_efa = node("a")
    del without_efa["status"]["allocatable"]["vpc.amazonaws.com/efa"]
    assert "none has enough vpc.amazonaws.com/efa" in check(without_efa)


def test_room_in_group_and_queue(trainer: WorkerGroup) -> None:
    assert "maxReplicas 16" in check_size(trainer, 17)
    queue = {"kind": "Queue", "metadata": {"name": "millrace"}, "spec": {"capability": {"memory": "800Gi"}}}
    api: Any = MemoryApi(queue | {"status": {"state": "Open"}})
    assert "memory: 880 GiB asked, 800 GiB in the queue" in check_queue(api, trainer, 2)
    assert check_queue(api, trainer, 1) == ""
    api.merge("Queue", "millrace", {"status": {"state": "Closed"}})
    assert "not Open" in check_queue(api, trainer, 1)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("stage", ["tokenizer", "compiler", "trainer"])
@pytest.mark.parametrize("mode", ["shared", "isolated"])
def test_a_dry_run_writes_every_manifest_that_a_deployment_sends(
    clusters: dict[str, Thing], overlay: str, stage: str, mode: str
) -> None:
    """Of the RayCluster the stage's group alone is changed."""
    worker, file = worker_group_of(clusters[overlay], stage), io.StringIO()
    text = "name = 'x' # it's \u00e4\n"
    deployment = deployment_of(stage, mode=mode)
    write_manifests(file, NO_API, worker, deployment, text)
    things = list(yaml.safe_load_all(file.getvalue()))
    patch = ["RayCluster"] if mode == "shared" else []
    assert [each["kind"] for each in things] == ["ConfigMap", "Job", "PodGroup", *patch, "RayJob"]
    assert {each["metadata"]["namespace"] for each in things} == {"millrace"}
    assert things[0]["data"]["recipe.toml"] == text
    if patch:
        groups = {each["groupName"]: each for each in things[3]["spec"]["workerGroupSpecs"]}
        assert groups[stage]["replicas"] == 2
        assert [each for name, each in groups.items() if name != stage] == [
            each for each in worker.cluster["spec"]["workerGroupSpecs"] if each["groupName"] != stage
        ]


def test_a_pipeline_ends_at_the_first_failure_and_counts_the_cost_of_an_attempt_s_nodes(
    clusters: dict[str, Thing], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer runs for ten hours, and the compiler fails. NODES are those of the trainer."""
    cluster = copy.deepcopy(clusters["eks"])
    cluster["metadata"].setdefault("annotations", {})[stage_annotation("tokenizer", NODE_PRICE)] = "2.50"
    api: Any = MemoryApi(cluster)

    nodes: dict[str, int | None] = {}

    def deploy(target: KubeRayTarget, request: DeployRequest, *, watch: Watch) -> int:
        nodes[request.stage] = request.nodes
        if request.stage == "compiler":
            return 4
        deployment, group = deployment_of(request.stage), worker_group_of(cluster, request.stage)
        record = record_of(api.create(render_deploy_job(group, deployment)))
        began_at = f"{datetime.now(UTC) - timedelta(hours=10):%Y-%m-%dT%H:%M:%SZ}"
        api.create(render_rayjob(group, deployment, 1, deployment.nodes) | {"status": {"startTime": began_at}})
        watch.look(record)
        watch.look(replace(record, attempts=(Outcome(0, "done"),)))
        return 0

    monkeypatch.setattr(KubeRayTarget, "deploy", deploy)
    request = DeployRequest("tokenizer", TINY, nodes=2, repetition="make pipeline A=b")
    assert KubeRayTarget(api).run_pipeline(request) == 4
    assert nodes == {"tokenizer": None, "compiler": 2}
    said = capsys.readouterr()
    assert f"${deployment_of('tokenizer').nodes * 25:,.2f}" in said.out
    assert "make pipeline A=b" in said.err
