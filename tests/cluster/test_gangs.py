"""Stages on fake trn1 nodes: gangs, queues, who may deploy what, and what happens to whoever is killed.

The head, the operator, Volcano and the deploy Jobs are real; the stages' pods become Ready without a container, so
their Ray nodes never join, and a deployment waits at that step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from deploy.exit_codes import EXIT_AGAIN
from images.platforms import REPOSITORY
from infra.shapes import find_shape
from k8s.objects.api import Api
from k8s.objects.record import read_record
from services.common.testing.waiting import wait_until
from tests.cluster.harness import Done, Harness, kill_group, load_images, name_of, publish_corpus, running_harness
from tests.cluster.kit import cluster, fake_nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NODES = 16
DEVICES = {"aws.amazon.com/neuron": str(find_shape("trn1.32xlarge").neuron_devices)}
MINUTE = 60.0


@pytest.fixture(scope="module")
def harness(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head")
    fake_nodes.fake(NODES)
    with running_harness(kit, tmp_path_factory.mktemp("gangs"), REPOSITORY / "tests/cluster/overlays/fake") as made:
        yield replace(made, recipe=REPOSITORY / "recipes/tiny-cpu.toml")  # over text that this machine has, too
    fake_nodes.remove_fake(NODES)


@pytest.fixture(autouse=True)
def nothing_deployed(harness: Harness) -> Iterator[None]:
    yield
    for stage in ("compiler", "trainer"):
        harness.stop(stage)


def deploy(harness: Harness, stage: str = "compiler", nodes: int = 2, **variables: str) -> str:
    """Deploy without waiting, and return the output. The compiler reads no artifact, so it is there from the start."""
    variables = of_size(stage, nodes) | variables
    return harness.succeed("deploy-stage", STAGE=stage, TAG=name_of("head"), FOLLOW="0", **variables)


def of_size(stage: str, nodes: int) -> dict[str, str]:
    """The variables with which the stage has so many nodes; the compiler's NODES are the trainer's."""
    return {"ARGS": f"--cluster.compiler_nodes={nodes}"} if stage == "compiler" else {"NODES": str(nodes)}


def refused(harness: Harness, stage: str = "compiler", nodes: int = 2, **variables: str) -> Done:
    """The end of a `deploy-stage` that refuses, and so has changed nothing."""
    variables = {"TAG": name_of("head"), **of_size(stage, nodes), **variables}
    done = harness.run("deploy-stage", STAGE=stage, FOLLOW="0", **variables)
    assert done.code != 0, done.said
    assert "Traceback" not in done.said
    assert harness.is_down(stage)
    return done


def test_an_image_that_no_node_has_is_refused(harness: Harness) -> None:
    done = refused(harness, TAG="9.9.9-cpu")
    assert done.code == 4
    assert "no node has the image millrace/head:9.9.9-cpu" in done.said
    assert name_of("head") in done.said


def test_a_root_that_the_stages_cannot_write_is_refused(harness: Harness) -> None:
    harness.root.chmod(0o555)
    cluster.run("chown", "0:0", harness.root)
    try:
        done = refused(harness)
    finally:
        cluster.run("chown", "10001:10001", harness.root)
        harness.root.chmod(0o755)
    assert done.code == 5
    assert "/fsx" in done.said


def test_a_person_without_rights_is_told_what_is_missing(harness: Harness) -> None:
    config = harness.root.parent / "nobody.kubeconfig"
    text = json.loads(cluster.KUBECONFIG.read_text())
    text["users"][0]["user"] = {"token": cluster.kubectl("-n", "default", "create", "token", "default").strip()}
    config.write_text(json.dumps(text))
    done = harness.run("stage-status", KUBECONFIG=str(config))
    assert done.code == 4
    assert "system:serviceaccount:default:default" in done.said
    assert "Traceback" not in done.said


def occupy(name: str, count: int = 1) -> None:
    """Pods of somebody else's, each on a whole trn1 node."""
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-{number}", "namespace": "default", "labels": {"of": name}},
            "spec": {
                "nodeSelector": {"type": "kwok"},
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "c", "image": "any", "resources": {"requests": DEVICES, "limits": DEVICES}}],
            },
        }
        for number in range(count)
    ]
    cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))
    wait_until(lambda: occupied(name) == count)


def occupied(name: str) -> int:
    pods = json.loads(cluster.kubectl("-n", "default", "get", "pods", "-l", f"of={name}", "-o", "json"))["items"]
    return sum("nodeName" in pod["spec"] for pod in pods)


def leave(name: str) -> None:
    cluster.kubectl("-n", "default", "delete", "pods", "-l", f"of={name}", "--grace-period=0", "--force")


def status(harness: Harness) -> str:
    return harness.run("stage-status").said


def test_two_pods_are_placed_when_both_fit_and_none_before(harness: Harness) -> None:
    occupy("neighbour", NODES - 1)
    deploy(harness, nodes=2)
    wait_until(lambda: "Insufficient aws.amazon.com/neuron" in status(harness), MINUTE)
    assert "0 of 2 compiler pods are ready" in status(harness)
    assert harness.bound("compiler") == []
    leave("neighbour")
    wait_until(lambda: len(harness.ready("compiler")) == 2, MINUTE)
    wait_until(lambda: "0 of 2 compiler pods have joined Ray" in cluster_log(harness, "compiler"), MINUTE)


def cluster_log(harness: Harness, stage: str) -> str:
    """The log of the deploy Job."""
    pods = harness.api.find_all("Pod", f"millrace.dev/component=deploy,millrace.dev/stage={stage}")
    return "".join(cluster.kubectl("-n", "millrace", "logs", pod["metadata"]["name"], quiet=True) for pod in pods)


def test_the_trainer_takes_the_nodes_that_the_compiler_has_left(harness: Harness) -> None:
    occupy("neighbour", NODES - 2)
    deploy(harness, "compiler")
    wait_until(lambda: len(harness.ready("compiler")) == 2, MINUTE)
    nodes = harness.bound("compiler")
    head = harness.head()["metadata"]["uid"]
    assert "stage compiler is deployed by" in refused(harness, "trainer", ARGS="--compile.enabled=false").said
    harness.stop("compiler")
    publish_corpus(harness)
    deploy(harness, "trainer", ARGS="--compile.enabled=false")
    wait_until(lambda: harness.bound("trainer") == nodes, MINUTE)
    assert harness.head()["metadata"]["uid"] == head
    leave("neighbour")


def test_sixteen_nodes_are_a_gang_and_seventeen_are_refused(harness: Harness) -> None:
    publish_corpus(harness)
    said = refused(
        harness, "trainer", 17, ARGS="--compile.enabled=false --batch.global_batch_size=136 --train.reduction=fast"
    ).said
    assert "maxReplicas 16" in said
    assert "room for 16 of 17" in said
    arguments = "--compile.enabled=false --batch.global_batch_size=64"
    said = deploy(harness, "trainer", 16, ARGS=arguments)
    assert "data-parallel degree 16" in said
    wait_until(lambda: len(harness.ready("trainer")) == 16, MINUTE)
    assert len(set(harness.bound("trainer"))) == 16


@pytest.mark.parametrize("moment", ["sent", "placing", "placed"])
def test_whoever_is_killed_the_deployment_goes_on(harness: Harness, moment: str) -> None:
    """The client for good, the deploy Job's pod with and without notice."""
    occupy("neighbour", NODES - 1)
    client = harness.start("deploy-stage", STAGE="compiler", TAG=name_of("head"), **of_size("compiler", 2))
    if moment == "sent":
        wait_until(lambda: is_deployed(harness), MINUTE)  # the Job of the deployment before may still be there
    else:
        wait_until(lambda: len(harness.pods("compiler")) == 2, MINUTE)
    if moment == "placed":
        leave("neighbour")
        wait_until(lambda: len(harness.ready("compiler")) == 2, MINUTE)
    kill_group(client)
    for force in ((), ("--grace-period=0", "--force")):
        wait_until(lambda: deploy_pod(harness), 3 * MINUTE)  # the Job controller waits longer before each next pod
        pod = deploy_pod(harness)
        cluster.kubectl("-n", "millrace", "delete", "pod", pod, *force)
        wait_until(lambda gone=pod: deploy_pod(harness) not in ("", gone), 2 * MINUTE)
    leave("neighbour")
    wait_until(lambda: len(harness.ready("compiler")) == 2, 2 * MINUTE)
    uids = {pod["metadata"]["uid"] for pod in harness.pods("compiler")}
    wait_until(lambda: "have joined Ray" in cluster_log(harness, "compiler"), 2 * MINUTE)
    assert {pod["metadata"]["uid"] for pod in harness.pods("compiler")} == uids
    assert harness.record("compiler").attempts == ()


def is_deployed(harness: Harness) -> bool:
    record = read_record(harness.api, "compiler")
    return record is not None and not record.is_over


def deploy_pod(harness: Harness) -> str:
    """The deploy Job's running pod."""
    pods = harness.api.find_all("Pod", "millrace.dev/component=deploy,millrace.dev/stage=compiler")
    running = [
        pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    return str(running[0]["metadata"]["name"]) if running else ""


def test_a_deployment_that_finds_no_room_in_time_goes_down_by_itself(harness: Harness) -> None:
    occupy("neighbour", NODES)
    done = harness.run("deploy-stage", STAGE="compiler", TAG=name_of("head"), WAIT="15", RETRIES="0")
    assert done.code == EXIT_AGAIN
    assert "not up after 15 s" in done.said
    assert "Insufficient aws.amazon.com/neuron" in done.said
    assert harness.is_down("compiler")
    assert "exit code 75: not up after 15 s" in status(harness)
    leave("neighbour")


def test_a_stage_whose_job_is_deleted_goes_down(harness: Harness) -> None:
    deploy(harness)
    wait_until(lambda: len(harness.ready("compiler")) == 2, MINUTE)
    wait_until(lambda: deploy_pod(harness), MINUTE)
    cluster.kubectl("-n", "millrace", "delete", "job", "deploy-compiler", "--wait=false")
    wait_until(lambda: harness.is_down("compiler"), 2 * MINUTE)


def test_a_gang_that_lost_a_node_stands_again(harness: Harness, dead_node: Callable[[], str]) -> None:
    deploy(harness, DRAIN="5")
    wait_until(lambda: len(harness.ready("compiler")) == 2, MINUTE)
    before = harness.bound("compiler")
    dead = dead_node()
    wait_until(lambda: len(harness.ready("compiler")) == 2 and dead not in harness.bound("compiler"), 6 * MINUTE)
    assert len(set(before) & set(harness.bound("compiler"))) == 1
    assert "which is unreachable: removed by force" in cluster_log(harness, "compiler")


@pytest.fixture
def dead_node(harness: Harness) -> Iterator[Callable[[], str]]:
    """Let one of the nodes that the compiler's pods are on die. A new one is there afterwards."""
    dead: list[str] = []

    def kill() -> str:
        dead.append(harness.bound("compiler")[0])
        fake_nodes.silence(dead[0])
        return dead[0]

    yield kill
    for name in dead:
        number = int(name.removeprefix("trn1-"))
        fake_nodes.remove_fake(1, first=number)
        fake_nodes.fake(1, first=number)


def abandon(harness: Harness) -> None:
    """Nobody holds the stage any more: its Job's pod is gone, and then the Job, without what it made."""
    cluster.kubectl("-n", "millrace", "patch", "job", "deploy-compiler", "-p", '{"spec": {"suspend": true}}')
    selector = "millrace.dev/component=deploy,millrace.dev/stage=compiler"
    wait_until(lambda: not harness.api.find_all("Pod", selector), 2 * MINUTE)
    cluster.kubectl("-n", "millrace", "delete", "job", "deploy-compiler", "--cascade=orphan")
    assert len(harness.ready("compiler")) == 2


def reap() -> str:
    """Run the CronJob once, and return its log."""
    cluster.kubectl("-n", "millrace", "create", "job", "reaper-now", "--from=cronjob/reaper")
    try:
        cluster.kubectl("-n", "millrace", "wait", "job/reaper-now", "--for=condition=Complete", "--timeout=400s")
        return cluster.kubectl("-n", "millrace", "logs", "job/reaper-now")
    finally:
        cluster.kubectl("-n", "millrace", "delete", "job", "reaper-now")
