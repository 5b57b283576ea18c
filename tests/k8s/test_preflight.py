"""The stage's image is asked before its stage is touched: what the image may see, and what follows from its answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import parse_requested_recipe, read_requested_recipe
from k8s.client.deployment_watch import NotDeployed, await_acceptance
from k8s.client.kuberay_target import KubeRayTarget
from k8s.client.resolved_deployment import DEFAULT_RECIPE
from k8s.client.status import describe_status
from k8s.controller import job
from k8s.controller.preflight import judge
from k8s.controller.reaper import ORPHAN_SECONDS
from k8s.controller.reconciler import Reconciler
from k8s.objects.api import is_job_over
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.deployment import RECORD_VERSION, Deployment
from k8s.objects.record import Acceptance, Outcome, write_acceptance, write_outcome
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError
from services.common.hardware.image_platform import describe_platform
from tests.k8s.builders import Clock, deployment_of, pod
from tests.k8s.rendered import Thing
from tests.k8s.world import Reconcile, World, complete_job, reap

PLATFORM = {name: describe_platform()[name] for name in ("variant", "python", "ray")}
CORPUS = {"schema": "corpus/5", "name": "notes", "id": "c" * 16}
IMAGE = deployment_of().image


def answer(code: int = 0, noise: str = "a warning\n", **changes: Any) -> str:
    """The termination message of the init container."""
    return f"{noise}{json.dumps({'platform': PLATFORM, 'upstream': [CORPUS], 'problem': None} | changes)}\n{code}\n"


@pytest.mark.parametrize(
    ("said", "mode", "code", "words"),
    [
        (answer(), "shared", 0, []),
        (
            answer(2, problem="unknown key 'a.b'."),
            "shared",
            2,
            [f"the image {IMAGE} does not accept", "'a.b'", "ARGS="],
        ),
        (answer(3, problem="no corpus"), "shared", 3, ["no corpus"]),
        (answer(5, problem="/fsx: Read-only file system"), "shared", 5, ["/fsx"]),
        (answer(platform=PLATFORM | {"ray": "2.59.0"}), "shared", 4, ["ray 2.59.0", PLATFORM["ray"], "MODE=isolated"]),
        (answer(platform=PLATFORM | {"python": "3.9.1"}), "shared", 4, ["python 3.9.1", PLATFORM["python"]]),
        (answer(platform=PLATFORM | {"ray": "2.59.0"}), "isolated", 0, []),
        ("Segmentation fault\n139\n", "shared", 4, [IMAGE, "exit code 139", "Segmentation fault"]),
        ("python: No module named services\n1\n", "shared", 4, [IMAGE, "No module named services"]),
        ("millrace: /fsx: Input/output error\n75\n", "shared", 75, ["Input/output error"]),
        ("millrace: no option --y\n2\n", "shared", 2, ["no option --y"]),
        ("", "shared", 4, [IMAGE, "no message"]),
    ],
)
def test_what_follows_from_an_answer(said: str, mode: str, code: int, words: list[str]) -> None:
    found = judge(deployment_of(mode=mode), said)
    if isinstance(found, Acceptance):
        assert (found.upstream, code) == (["corpus/5 notes/cccccccccccccccc"], 0)
        assert found.ray_version == json.loads(said.splitlines()[1])["platform"]["ray"]
    else:
        assert found.exit_code == code
        assert [word for word in words if word not in found.message] == []


def test_the_image_has_no_rights_of_the_controller_beside_it(overlays: dict[str, list[Thing]]) -> None:
    """tests/cluster/test_admission.py has what an API server refuses."""
    group = worker_group_of(next(each for each in overlays["eks"] if each["kind"] == "RayCluster"), "trainer")
    template = render_deploy_job(group, deployment_of())["spec"]["template"]
    pod = template["spec"]
    [asked], [controller] = pod["initContainers"], pod["containers"]
    assert (asked["image"], "env" in asked) == (IMAGE, False)
    assert template["metadata"]["annotations"] == {"eks.amazonaws.com/skip-containers": asked["name"]}
    assert pod["automountServiceAccountToken"] is False
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounted = [{each["name"] for each in container["volumeMounts"]} for container in (asked, controller)]
    assert mounted[0] & mounted[1] == {"fsx"}
    assert "projected" in volumes["token"]
    assert "token" in mounted[1]
    assert volumes["recipe"]["configMap"]["name"] == "trainer-recipe-0000000000"


@pytest.fixture
def make_world(eks_cluster: Thing, clock: Clock) -> Callable[[], World]:
    return lambda: World(eks_cluster, clock, nodes=2)


def ask(world: World, said: str | None) -> None:
    """The pod of the deploy Job, whose init container has said this."""
    state = {"running": {}} if said is None else {"terminated": {"exitCode": 0, "message": said}}
    status = {"initContainerStatuses": [{"name": "preflight", "state": state}]}
    if world.api.find("Pod", "pod"):
        world.api.merge("Pod", "pod", {"status": status})
    else:
        world.api.create({"kind": "Pod", "metadata": {"name": "pod"}, "spec": {}, "status": status})


def test_a_refused_deployment_touches_nothing_of_its_stage(world: World, reconcile: Reconcile) -> None:
    """Not even the pods that an earlier deployment has left up (KEEP=1)."""
    reconcile(keep=True)
    complete_job(world)
    ask(world, answer(3, problem="no corpus"))
    assert reconcile(id="def456", is_accepted=False) == Outcome(3, "no corpus")
    assert (world.bound(), world.api.names("RayJob")) == (["n0", "n1"], ["trainer-abc123-1"])
    assert (world.record.attempts, world.record.acceptance) == ((), None)


def test_an_image_is_heard_once(world: World, reconcile: Reconcile) -> None:
    """kubelet reports the answer a moment later, and the next pod of the Job asks again."""
    ask(world, None)
    said = iter([None, None, answer()])
    world.watch = lambda: ask(world, next(said, "Segmentation fault\n139\n"))
    assert reconcile(is_accepted=False).exit_code == 0
    assert world.record.acceptance == Acceptance(PLATFORM["ray"], ["corpus/5 notes/cccccccccccccccc"])


def test_a_job_of_another_version_ends_and_says_what_to_update(capsys: pytest.CaptureFixture[str]) -> None:
    """The client, which waits for the Job's answer, ends it as one that crashed."""
    fields = json.loads(deployment_of().to_json()) | {"version": RECORD_VERSION + 1, "hosts": 2}
    assert job.main(json.dumps(fields)) == 4
    said = capsys.readouterr().err
    assert [words for words in (f"version {RECORD_VERSION + 1}", "HEAD_TAG=", "git pull") if words not in said] == []


def set_pod(world: World, state: Thing) -> None:
    """Give the deploy Job a pod in this state, or, as Kubernetes does after a deadline, end the Job and its pod."""
    spec = (world.api.find("Job", "deploy-trainer") or {})["spec"]
    template = spec["template"]
    pod = {"kind": "Pod", "metadata": template["metadata"] | {"name": "pod", "uid": "u"}, "status": state}
    world.api.delete("Pod", "pod", grace_seconds=0)
    if "activeDeadlineSeconds" in spec:
        complete_job(world)
    else:
        world.api.create(pod | {"spec": template["spec"] | {"nodeName": "core-0"}})


class Client:
    """A client that waits for a deploy Job, whose pod it finds in the states that are given, one after the other."""

    def __init__(self, world: World, *states: Thing) -> None:
        self.world = world
        self._states = list(states)
        self.deployment: Deployment = world.deploy(is_accepted=False)

    def sleep(self, seconds: float) -> None:
        """Time passes, kubelet reports the next state, and then whoever watches the world acts."""
        self.world.clock.now += seconds
        set_pod(self.world, self._states.pop(0) if len(self._states) > 1 else self._states[0])
        self.world.watch()

    def wait(self) -> Acceptance:
        return await_acceptance(self.world.api, self.deployment)


def state(which: str = "preflight", **of_container: Thing) -> Thing:
    others = {"waiting": {"reason": "PodInitializing"}}
    states = {name: of_container if name == which else others for name in ("preflight", "deploy")}
    if which == "deploy":
        states["preflight"] = {"terminated": {"exitCode": 0, "message": answer()}}
    init, main = ([{"name": name, "state": each}] for name, each in states.items())
    return {"phase": "Pending", "initContainerStatuses": init, "containerStatuses": main}


def waiting(reason: str, message: str = "") -> Thing:
    return state(waiting={"reason": reason, "message": message})


def ended(code: int, message: str = "", which: str = "preflight") -> Thing:
    return state(which, terminated={"exitCode": code, "message": message})


@pytest.mark.parametrize(
    ("states", "seconds", "words"),
    [
        ([waiting("ErrImagePull", "manifest unknown")], 91, [IMAGE, "core-0", "manifest unknown", "make images PUSH="]),
        ([waiting("ErrImageNeverPull")], 1, [f"{IMAGE} cannot run"]),
        ([ended(127, "sh: not found")], 1, [IMAGE, "exit code 127", "sh: not found"]),
        ([ended(1, "Traceback\nImportError: x", "deploy")], 1, ["millrace/head", "ImportError: x"]),
        ([waiting("")], 1_800, [IMAGE, "did not answer in time"]),
        ([ended(137), ended(143), waiting("")], 1_800, ["did not answer in time"]),  # pods that were evicted
        ([*[waiting("ErrImagePull")] * 60, *[waiting("")] * 30, waiting("ErrImagePull")], 181, [IMAGE]),  # a new try
    ],
)
def test_a_job_whose_image_will_never_answer_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, states: list[Thing], seconds: int, words: list[str]
) -> None:
    client, began = Client(world, *states), world.clock.now
    monkeypatch.setattr("time.sleep", client.sleep)
    with pytest.raises(NotDeployed) as raised:
        client.wait()
    assert raised.value.exit_code == (75 if seconds == 1_800 else 4)
    assert [word for word in words if word not in str(raised.value)] == []
    assert seconds <= world.clock.now - began <= seconds + 5
    assert world.record.outcome == Outcome(raised.value.exit_code, str(raised.value).partition("- ")[2])
    client.sleep(1)
    assert world.record.is_over


def test_an_image_has_its_time_after_an_older_pod_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod of the deployment before works on a checkpoint for longer than the image may take."""
    client, began = Client(world, waiting("")), world.clock.now
    world.api.create(pod("older", "core-1", "deploy"))
    monkeypatch.setattr("time.sleep", lambda seconds: client.sleep(60 * seconds))

    def end() -> None:
        if world.clock.now > began + 3_000:
            world.api.delete("Pod", "older", grace_seconds=0)
        if world.clock.now > began + 4_000:
            write_acceptance(world.api, world.record, Acceptance())

    world.watch = end
    assert client.wait() == Acceptance()
    assert "pod older" in capsys.readouterr().out


def test_a_client_waits_for_the_answer_and_tells_what_for(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pull that fails for a minute may succeed. `stage-status` tells the same, and stop-stage ends the wait."""
    client = Client(world, *[waiting("ErrImagePull", "registry is down")] * 60, state(running={}))
    monkeypatch.setattr("time.sleep", client.sleep)
    statuses: list[str] = []

    def look() -> None:
        statuses.append(describe_status(world.api))
        if len(statuses) == 65:
            write_outcome(world.api, world.record, Outcome(3, "no corpus"))
        if len(statuses) == 67:
            complete_job(world)

    world.watch = look
    with pytest.raises(NotDeployed, match="no corpus") as raised:
        client.wait()
    assert raised.value.exit_code == 3
    assert "registry is down" in capsys.readouterr().out
    assert "registry is down" in statuses[0]
    assert world.api.names("Job") == ["deploy-trainer"], "its outcome stays for stage-status"

    client = Client(world, waiting("ErrImagePull", "registry is down"))
    monkeypatch.setattr("time.sleep", client.sleep)
    world.watch = lambda: None
    KubeRayTarget(world.api).stop("trainer")
    assert (world.record.is_over, world.record.outcome and world.record.outcome.exit_code) == (True, 75)


def stand(world: World) -> None:
    """Make what `make cluster-up` leaves in the namespace."""
    without_pool = {"metadata": {"annotations": {"millrace.dev/trainer-node-pool": None}}}
    cluster = world.api.merge("RayCluster", "millrace", without_pool)
    group = worker_group_of(cluster, "trainer")
    world.api.create({"kind": "Queue", "metadata": {"name": group.queue}, "spec": {}})
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "fsx"}, "status": {"phase": "Bound"}}
    world.api.create(claim)
    labels = {"ray.io/cluster": "millrace", "ray.io/node-type": "head"}
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    head = {"kind": "Pod", "metadata": {"name": "head", "labels": labels}, "spec": group.head_pod, "status": status}
    world.api.create(head)


def test_a_stop_removes_a_job_that_kubernetes_does_not_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pod is on a lost node, or the check of its image hangs."""
    world.deploy(is_accepted=False)
    began = world.clock.now
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(world.clock, "now", world.clock.now + seconds))
    KubeRayTarget(world.api).stop("trainer")
    assert (world.api.names("Job"), world.clock.now - began < 400) == ([], True)


GOOD, OLD, NEW = (f"a/b@sha256:{name}" for name in ("good", "old", "new"))


def play(world: World, state_of_new: Thing, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let Kubernetes and the deploy Job act while the client waits; the image NEW gets no further than this state."""
    stand(world)

    def act(seconds: float) -> None:
        job = world.api.find("Job", "deploy-trainer")
        if job and not is_job_over(job):
            record = world.record
            is_new = record.deployment.image == NEW
            set_pod(world, state_of_new if is_new else ended(0, answer()))
            if not is_new or "terminated" in state_of_new["initContainerStatuses"][0]["state"]:
                Reconciler(world.api, record.deployment, "pod").run()
                complete_job(world)
                world.api.delete("Pod", "pod", grace_seconds=0)
        world.pass_time()

    monkeypatch.setattr("time.sleep", act)
    return act


@pytest.mark.usefixtures("reconcile")
@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("state_of_new", [ended(0, answer(3, problem="no corpus")), waiting("ErrImagePull")])
def test_what_is_not_accepted_leaves_the_deployment_before_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch, state_of_new: Thing, is_stopped: bool
) -> None:
    """Twice: its pods are kept, and stage-status, stage-run and rollback-stage know it with its recipe."""
    act = play(world, state_of_new, monkeypatch)
    target, recipe = KubeRayTarget(world.api), read_requested_recipe(DEFAULT_RECIPE)
    other = parse_requested_recipe(f"{recipe.text}# changed\n", "another")
    wanted = DeployRequest("trainer", recipe.with_arguments("--train.seed=7"), GOOD, nodes=2, is_kept=True)
    assert target.deploy(replace(wanted, is_followed=False)) == 0
    for _ in range(2):
        with pytest.raises(NotDeployed):
            target.deploy(DeployRequest("trainer", other, NEW, nodes=1))
    act(1)
    assert world.record.deployment.image == NEW
    if is_stopped:
        target.stop("trainer")
    reap(world, 3 * ORPHAN_SECONDS)
    assert world.bound() == ([] if is_stopped else ["n0", "n1"])
    before = world.record.accepted
    assert before
    assert before.image == GOOD
    status = describe_status(world.api)
    assert (f"by {before.user}: {GOOD}" in status, "KEEP=1" in status, "orphaned" in status) == (
        True,
        not is_stopped,
        False,
    )
    good = {"millrace.dev/trainer-good-images": json.dumps([OLD, GOOD])}
    world.api.merge("RayCluster", "millrace", {"metadata": {"annotations": good}})
    assert target.roll_back(DeployRequest("trainer", is_followed=False)) == 0
    again = world.record.deployment
    assert (again.image, again.recipe_digest) == (OLD, before.recipe_digest)
    assert (again.arguments, again.nodes) == (before.arguments, 2)


def test_a_rollback_does_not_repeat_what_was_refused(world: World) -> None:
    """The image that was refused has run nowhere, so the one that the worker group has is what is rolled back."""
    group = worker_group_of(world.api.find("RayCluster", "millrace") or {}, "trainer")
    good = json.dumps(["a@sha256:1", group.image])
    world.api.merge("RayCluster", "millrace", {"metadata": {"annotations": {"millrace.dev/trainer-good-images": good}}})
    world.deploy(is_accepted=False)
    with pytest.raises(DeviceError, match="RECIPE="):
        KubeRayTarget(world.api).roll_back(DeployRequest("trainer"))
