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

from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import RequestedRecipe, read_requested_recipe
from images.platforms import REPOSITORY
from k8s.client.compile_tasks import check_trace
from k8s.client.deployment_plan import describe_plan, write_manifests
from k8s.client.deployment_watch import Watch
from k8s.client.kuberay_target import KubeRayTarget
from k8s.client.resolved_deployment import DEFAULT_RECIPE, resolve
from k8s.objects.attempt import render_isolated_rayjob, render_rayjob
from k8s.objects.capacity import check_nodes, check_queue, check_size
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import RECORD_VERSION, Deployment, UnknownRecord
from k8s.objects.names import CAPACITY_END, NODE_POOL, NODE_PRICE, stage_annotation
from k8s.objects.record import Outcome, record_of
from k8s.objects.worker_group import WorkerGroup, worker_group_of
from services.common.errors import RecipeError
from tests.cluster.kit.fake_nodes import fake_node
from tests.k8s.builders import DIGEST, deployment_of, outline_of
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import OVERLAYS, Thing, cluster_of

IMAGE = f"a/b@sha256:{DIGEST}"
"""An image that has a digest is looked up nowhere."""
TINY = read_requested_recipe(DEFAULT_RECIPE)
NO_API: Any = MemoryApi()
RECIPE = REPOSITORY / "recipes/llama2-7b-trn1.toml"
ON_CPU = "--compile.trace_on=cpu"


@pytest.fixture(scope="module")
def clusters(overlays: dict[str, list[Thing]]) -> dict[str, Thing]:
    """The RayCluster of each overlay."""
    return {name: cluster_of(things) for name, things in overlays.items()}


def test_a_deployment_that_names_no_recipe_takes_the_overlay_s(clusters: dict[str, Thing]) -> None:
    """The images of an overlay take its recipe; those for Neuron would refuse one for CPUs (test_roads.py)."""
    [_, recipe] = resolve(NO_API, worker_group_of(clusters["local"], "trainer"), DeployRequest("trainer", tag=IMAGE))
    assert (recipe.outline.name, recipe.outline.parallel.device) == ("tiny-cpu", "cpu")


def test_nodes_decide_the_data_parallel_degree(trainer: WorkerGroup) -> None:
    request = DeployRequest("trainer", TINY, IMAGE, nodes=1)
    deployment, recipe = resolve(NO_API, trainer, request)
    assert recipe.outline.parallel.data_parallel_size == 1
    assert deployment.arguments == ("--parallel.data_parallel_size=1",)
    assert deployment.drain_seconds == 300
    trainer.cluster["metadata"]["annotations"]["millrace.dev/trainer-checkpoint-seconds"] = "200.5"
    assert resolve(NO_API, trainer, request)[0].drain_seconds == 602
    with pytest.raises(RecipeError, match=r"multiple of parallel\.data_parallel_size 3"):
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


@pytest.fixture
def trainer(clusters: dict[str, Thing]) -> WorkerGroup:
    return worker_group_of(copy.deepcopy(clusters["eks"]), "trainer")


def test_room_on_nodes(trainer: WorkerGroup) -> None:
    def check(*nodes: Thing, pods: int = 2) -> str:
        api: Any = MemoryApi(*nodes)
        return check_nodes(api, trainer, pods)

    nodes = [fake_node("a"), fake_node("b")]
    assert check(*nodes) == ""
    assert "room for 1 of 2" in check(nodes[0])
    other = nodes[0] | {"metadata": {"name": "a", "labels": {"node.kubernetes.io/instance-type": "m7i.large"}}}
    assert "0 nodes have the labels that trainer pods select" in check(other)
    tainted = {"spec": {"taints": [{"key": "maintenance", "effect": "NoSchedule"}]}}
    assert "maintenance:NoSchedule" in check(*(each | tainted for each in nodes))
    del nodes[0]["status"]["allocatable"]["vpc.amazonaws.com/efa"]
    assert "none has enough vpc.amazonaws.com/efa" in check(nodes[0])


def test_room_in_group_and_queue(trainer: WorkerGroup) -> None:
    assert "maxReplicas 16" in check_size(trainer, 17)
    queue = {"kind": "Queue", "metadata": {"name": "millrace"}, "spec": {"capability": {"memory": "800Gi"}}}
    api: Any = MemoryApi(queue | {"status": {"state": "Open"}})
    assert "memory: 880 GiB asked, 800 GiB in the queue" in check_queue(api, trainer, 2)
    assert check_queue(api, trainer, 1) == ""
    api.merge("Queue", "millrace", {"status": {"state": "Closed"}})
    assert "not Open" in check_queue(api, trainer, 1)


def test_hours_times_price_come_first(trainer: WorkerGroup) -> None:
    group, end = trainer, datetime.now(UTC) + timedelta(hours=2)
    annotations = {NODE_POOL: "millrace/trainium", CAPACITY_END: f"{end:%Y-%m-%dT%H:%M:%SZ}"}
    group.cluster["metadata"]["annotations"] |= {
        stage_annotation("trainer", key): annotations[key] for key in annotations
    }
    limited, unlimited = outline_of(**{"train.time_limit_seconds": "7200"}), outline_of()
    cost, nodes, capacity = describe_plan(group, deployment_of(nodes=4), limited).split("\n")[:3]
    assert ("$86.00" in cost, "$172.00" in cost) == (True, True)
    assert "millrace/trainium: 4 nodes" in nodes
    assert "1.3 h from now" in capacity
    for hours, outline, has_attempt in ((1, limited, False), (3, limited, True), (3, unlimited, False)):
        cost = describe_plan(group, deployment_of(limit_seconds=hours * 3_600), outline).split("\n")[0]
        assert ("$86.00" in cost, f"${43 * hours:,}.00 at most" in cost) == (has_attempt, True)
    cost = describe_plan(group, deployment_of(), unlimited).split("\n")[0]
    assert ("$43.00" in cost, "at most" in cost) == (True, False)


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


@pytest.fixture
def compiler(compiler_on_cpus: list[Thing]) -> WorkerGroup:
    return worker_group_of(copy.deepcopy(cluster_of(compiler_on_cpus)), "compiler")


def resolved(group: WorkerGroup, *arguments: str) -> tuple[Deployment, RequestedRecipe]:
    request = DeployRequest("compiler", read_requested_recipe(RECIPE), IMAGE, arguments=arguments)
    return resolve(NO_API, group, request)


@pytest.mark.parametrize(("tasks", "nodes"), [(1, 1), (3, 1), (4, 2), (8, 3)])
def test_there_are_as_many_pods_as_the_recipe_s_tasks_fill(compiler: WorkerGroup, tasks: int, nodes: int) -> None:
    arguments = (f"--compile.num_workers={tasks}",)
    deployment = resolved(compiler, *arguments)[0]

    assert (deployment.nodes, deployment.arguments) == (nodes, (*arguments, ON_CPU))


@pytest.mark.parametrize("tasks", [(), ("--compile.num_workers=8",)])
def test_the_recipe_s_nodes_decide_how_many_tasks_there_are(compiler: WorkerGroup, tasks: tuple[str, ...]) -> None:
    """No node is paid for that has no task, and no task is said to run that waits for a node."""
    arguments = (*tasks, "--cluster.compiler_nodes=2")
    found = resolved(compiler, *arguments)[0]

    assert (found.nodes, found.arguments) == (2, (*arguments, ON_CPU, "--compile.num_workers=6"))
    assert resolved(compiler, *found.arguments)[0].arguments == found.arguments


def test_a_task_that_fits_on_no_pod_is_refused_at_once(compiler: WorkerGroup) -> None:
    """Ray would wait for a node of its size for ever."""
    said = r"task_memory_gib = 128 .*compiler pods have 30 CPUs and 112 GiB"
    with pytest.raises(RecipeError, match=said):
        resolved(compiler, "--compile.task_memory_gib=128")


def test_where_graphs_are_traced_follows_the_pods(compiler: WorkerGroup, clusters: dict[str, Thing]) -> None:
    """COMPILER_POOL of the overlay's settings moves both."""
    compiler_on_trainium = worker_group_of(clusters["eks"], "compiler")
    (_, on_cpu), (deployment, on_device) = resolved(compiler), resolved(compiler_on_trainium)
    assert (on_cpu.outline.compile.trace_on, on_device.outline.compile.trace_on) == ("cpu", "device")
    assert check_trace(compiler, on_cpu.outline) == check_trace(compiler_on_trainium, on_device.outline) == ""
    assert ON_CPU not in deployment.arguments

    deployment, no_tasks = resolved(compiler, "--parallel.device=cpu")
    assert (deployment.arguments, check_trace(compiler, no_tasks.outline)) == (("--parallel.device=cpu",), "")


def test_a_trace_on_a_device_is_refused_where_the_compiler_has_none(compiler: WorkerGroup) -> None:
    said = check_trace(compiler, resolved(compiler, "--compile.trace_on=device")[1].outline)
    assert 'compile.trace_on is "device", but compiler pods have no aws.amazon.com/neuron' in said
