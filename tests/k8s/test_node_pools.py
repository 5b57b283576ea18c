"""Nodes come with a deployment and go after it: whole deployments in a world in memory, over a node group of moto's."""

from __future__ import annotations

import copy
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws
from ray.job_submission import JobStatus

from k8s.client.commands import stop_stage
from k8s.client.node_pool import require_nodes_given_back, tell_left_nodes
from k8s.client.status import describe_status
from k8s.controller import node_pool, reaper, reconciler
from k8s.controller.node_pool import LOOK_SECONDS, RELEASE_SECONDS, NodeRelease, open_node_pool
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import ORPHAN_SECONDS, StageReaper
from k8s.controller.reconciler import Reconciler
from k8s.objects import eks
from k8s.objects.api import Conflict
from k8s.objects.names import node_pool_annotation
from k8s.objects.node_shares import read_share_book
from k8s.objects.record import Outcome, ask_to_stop
from services.common.errors import DeviceError
from tests.k8s.builders import Clock
from tests.k8s.cloud import POOL, REGION, Cloud, Refusal
from tests.k8s.rendered import Thing, cluster_of, of_kind
from tests.k8s.world import LOST, NoLog, World, cluster_group, ended

RUNNING = DriverState(JobStatus.RUNNING, None, "", 1)


@pytest.fixture(scope="module", autouse=True)
def account() -> Iterator[None]:
    """One client for all: botocore takes a third of a second to make it."""
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        patch.setenv("AWS_REGION", REGION)
        eks._connect.cache_clear()
        yield
    eks._connect.cache_clear()


@pytest.fixture
def make_world(overlays: dict[str, list[Thing]], tmp_path: Path, clock: Clock) -> Iterator[Callable[[], World]]:
    """Without a node."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    template = cluster_group(cluster)["template"]
    cluster["metadata"]["annotations"][node_pool_annotation("trainer")] = POOL
    mounts = template["spec"]["containers"][0]["volumeMounts"]
    next(each for each in mounts if each["name"] == "fsx")["mountPath"] = str(tmp_path)
    before, began = signal.getsignal(signal.SIGTERM), clock.now

    def make() -> World:
        clock.now = began
        return World(cluster, clock, nodes=0)

    yield make
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def world(make_world: Callable[[], World]) -> World:
    return make_world()


@pytest.fixture
def cloud(world: World) -> Cloud:
    made = Cloud()
    world.watch = lambda: made.serve(world)
    return made


@pytest.fixture
def reconcile(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a deployment to its end."""
    monkeypatch.setattr(reconciler, "RayJobs", lambda cluster, namespace: world)
    monkeypatch.setattr(reconciler, "DriverLog", NoLog)
    monkeypatch.setattr(Reconciler, "_pause", lambda self: world.pass_time())

    def run(**changes: Any) -> Outcome:
        outcome = Reconciler(world.api, world.deploy(node_pool=POOL, **changes), "pod").run()  # type: ignore[arg-type]
        assert outcome
        world.pass_time()
        return outcome

    return run


def held(world: World) -> dict[str, int]:
    """Nodes of the pool, by the stage that holds them."""
    shares = read_share_book(world.api).pools.get(POOL)  # type: ignore[arg-type]
    return shares.nodes if shares else {}


def is_down(world: World) -> bool:
    has_lease = world.api.find("Lease", "stage-trainer") is not None
    return not (held(world) or world.api.names("Pod") or world.api.names("PodGroup") or has_lease)


def reap(world: World, seconds: float) -> None:
    stage_reaper = StageReaper(world.api, "trainer")  # type: ignore[arg-type]
    until = world.clock.now + seconds
    while stage_reaper.advance() and world.clock.now < until:
        world.pass_time()


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [([ended(0)], 0), ([ended(3, "millrace: no corpus")], 3), ([LOST, ended(0)], 0), ([LOST, LOST, LOST, LOST], 75)],
)
def test_nodes_come_for_a_deployment_and_go_after_it(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome], states: list[DriverState], exit_code: int
) -> None:
    bound: list[list[str]] = []

    def attempt(number: int) -> DriverState:
        bound.append(world.bound())
        assert cloud.size == 2
        return states[number - 1]

    world.attempt = attempt
    assert reconcile(retries=3).exit_code == exit_code
    assert bound == [["ip-0", "ip-1"]] * len(states)
    assert cloud.sizes == [0, 2, 0], "once up and once down, whatever happened between"
    assert is_down(world)
    assert world.api.names("Node") == []


def test_the_group_is_lowered_to_what_it_was_and_not_before_the_pods_are_gone(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.resize(1)
    pods: list[int] = []
    resize = eks.resize_node_group

    def watched(name: str, desired: int) -> None:
        pods.append(len(world.api.names("Pod")))
        resize(name, desired)

    monkeypatch.setattr(node_pool, "resize_node_group", watched)
    assert reconcile().exit_code == 0
    assert cloud.sizes == [0, 1, 3, 1]
    assert pods == [0, 0]


def test_nodes_that_are_simply_there_are_left_alone(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    """A worker group without a pool; EKS is not asked."""
    cloud.resize(2)
    world.pass_time()
    refusals = [Refusal(each, 403, "AccessDeniedException") for each in ("DescribeNodegroup", "UpdateNodegroupConfig")]
    outcome = Reconciler(world.api, world.deploy(), "pod").run()  # type: ignore[arg-type]
    assert outcome == Outcome(0, "done")
    assert cloud.sizes == [0, 2]
    for refusal in refusals:
        refusal.end()


def test_a_stop_gives_the_nodes_back(world: World, cloud: Cloud, reconcile: Callable[..., Outcome]) -> None:
    def stop() -> None:
        cloud.serve(world)
        if world.drivers and not world.record.stop:
            ask_to_stop(world.api, world.record, "ann")  # type: ignore[arg-type]

    world.watch = stop
    world.attempt = lambda number: RUNNING
    assert reconcile() == Outcome(75, "stopped by ann; the same command continues")
    assert cloud.sizes == [0, 2, 0]
    assert is_down(world)


def test_a_job_that_somebody_deletes_gives_the_nodes_back(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    def delete() -> None:
        cloud.serve(world)
        if world.drivers:
            world.api.delete("Job", "deploy-trainer")

    world.watch = delete
    world.attempt = lambda number: RUNNING
    assert "its Job was deleted" in reconcile().message
    assert cloud.sizes == [0, 2, 0]
    assert is_down(world)


class Killed(BaseException):
    """SIGKILL."""


class Mortal:
    """The API for a process that is killed after its n-th write, of whatever kind."""

    def __init__(self, api: Any, writes: int) -> None:
        self._api, self._left = api, writes

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._api, name)
        return self.counted(call) if name in ("create", "merge", "replace", "delete") else call

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            done = call(*arguments, **options)
            self._left -= 1
            if self._left == 0:
                raise Killed
            return done

        return write


def test_a_deploy_job_that_is_killed_after_any_write_leaves_no_node(
    make_world: Callable[[], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Kubernetes' objects or of the group; what is between two writes changes nothing. Its next pod goes on."""
    worlds: list[World] = []
    monkeypatch.setattr(reconciler, "RayJobs", lambda cluster, namespace: worlds[-1])
    monkeypatch.setattr(reconciler, "DriverLog", NoLog)
    monkeypatch.setattr(Reconciler, "_pause", lambda self: worlds[-1].pass_time())
    resize, cloud = eks.resize_node_group, Cloud()
    for writes in itertools.count(1):
        world = make_world()
        worlds.append(world)
        cloud.sizes = [0]
        world.watch = lambda world=world: cloud.serve(world)  # type: ignore[misc]
        deployment = world.deploy(node_pool=POOL)
        api = Mortal(world.api, writes)
        monkeypatch.setattr(node_pool, "resize_node_group", api.counted(resize))
        try:
            outcome = Reconciler(api, deployment, "first").run()  # type: ignore[arg-type]
        except Killed:
            outcome = Reconciler(world.api, deployment, "second").run()  # type: ignore[arg-type]
        else:
            break
        world.pass_time()
        assert outcome, f"killed after write {writes}"
        assert (cloud.sizes, held(world), world.bound()) == ([0, 2, 0], {}, []), f"killed after write {writes}"
    assert writes > 15


def orphan(world: World, **changes: Any) -> None:
    """A stage that stands, whose pod is lost, and whose Job is deleted with --cascade=orphan."""
    watch = world.watch

    def leave() -> None:
        watch()
        if len(world.bound()) == 2 and world.drivers:
            raise Killed

    world.watch = leave
    world.attempt = lambda number: RUNNING
    with pytest.raises(Killed):
        Reconciler(world.api, world.deploy(node_pool=POOL, **changes), "pod").run()  # type: ignore[arg-type]
    world.watch = watch
    world.api.delete("Job", "deploy-trainer")


@pytest.mark.usefixtures("reconcile")
def test_the_nodes_of_a_stage_that_nobody_holds_are_given_back(
    world: World, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan(world)
    reap(world, ORPHAN_SECONDS - 10)
    assert (cloud.size, len(world.bound())) == (2, 2), "somebody may be about to deploy it"
    reap(world, 3 * ORPHAN_SECONDS)
    world.pass_time()
    assert cloud.sizes == [0, 2, 0]
    assert is_down(world)
    said = capsys.readouterr().out
    assert "no deploy Job holds 2 pods, 1 RayJobs that run, its PodGroup, 2 nodes of its pool" in said
    assert f"node group {POOL}: 2 -> 0 nodes" in said


@pytest.mark.usefixtures("reconcile")
def test_nodes_are_given_back_although_somebody_deleted_the_raycluster(world: World, cloud: Cloud) -> None:
    """And with it the pods. The operator's RayJobs and the gang are left."""
    orphan(world)
    world.api.delete("RayCluster", "millrace")
    for name in world.api.names("Pod"):
        world.api.delete("Pod", name, grace_seconds=0)
    reap(world, 3 * ORPHAN_SECONDS)
    world.pass_time()
    assert cloud.sizes == [0, 2, 0]
    assert is_down(world)


def test_kept_pods_keep_their_nodes_until_they_are_stopped(
    overlays: dict[str, list[Thing]],
    world: World,
    cloud: Cloud,
    reconcile: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """KEEP=1; then `stop-stage` on a machine that has no AWS account, and a reaper that it starts."""
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    world.api.create(of_kind(overlays["eks"], "CronJob")["reaper"])
    reconcile(keep=True)
    world.api.merge("Job", "deploy-trainer", {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    reap(world, 3 * ORPHAN_SECONDS)
    assert (world.bound(), held(world)) == (["ip-0", "ip-1"], {"trainer": 2})
    with pytest.raises(DeviceError, match=rf"{POOL} \(trainer holds 2\): make stop-stage STAGE=trainer"):
        require_nodes_given_back(world.api)  # type: ignore[arg-type]
    tell_left_nodes(world.api)  # type: ignore[arg-type]
    assert "--nodegroup-name trainium --scaling-config desiredSize=0" in capsys.readouterr().out
    stop_stage(world.api, "trainer")  # type: ignore[arg-type]
    assert f"the nodes that it held of node group {POOL} go within 5 minutes" in capsys.readouterr().out
    assert cloud.size == 2
    [job] = [name for name in world.api.names("Job") if name.startswith("reaper-")]
    spec = world.api.find("Job", job)["spec"]["template"]["spec"]  # type: ignore[index]
    assert spec["containers"][0]["command"] == ["python", "-m", "k8s.controller.reaper"]
    reap(world, 3 * ORPHAN_SECONDS)
    world.pass_time()
    assert cloud.sizes == [0, 2, 0]
    assert is_down(world)
    require_nodes_given_back(world.api)  # type: ignore[arg-type]


def test_a_deployment_takes_over_the_nodes_that_the_one_before_kept(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    reconcile(keep=True)
    reconcile(id="def456", image="another", nodes=3)
    assert cloud.sizes == [0, 2, 3, 0]
    assert is_down(world)


def test_eks_that_is_busy_is_asked_again(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    """It makes one update of a group at a time."""
    refusal = Refusal("UpdateNodegroupConfig", 409, "ResourceInUseException", times=3)
    assert reconcile() == Outcome(0, "done")
    assert refusal.left == 0
    assert cloud.sizes == [0, 2, 0]
    assert f"node group {POOL}: 0 -> 2 nodes, when the update that EKS makes of it has ended" in capsys.readouterr().out


def test_nodes_that_do_not_come_are_given_up_after_the_wait(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    cloud.has_capacity = False
    cloud.set_health("AsgInstanceLaunchFailures", "We currently do not have sufficient trn1.32xlarge capacity")
    outcome = reconcile(start_timeout_seconds=600)
    assert outcome.exit_code == 75
    assert "not up after 600 s: 0 of 2 trainer pods are ready" in outcome.message
    assert f"0 of 2 nodes of node group {POOL} are ready; AsgInstanceLaunchFailures: We currently" in outcome.message
    assert cloud.sizes == [0, 2, 0]
    assert is_down(world)


def test_an_account_that_may_not_resize_is_told_at_once(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    began = world.clock.now
    refusal = Refusal("UpdateNodegroupConfig", 403, "AccessDeniedException")
    outcome = reconcile()
    refusal.end()
    assert outcome.exit_code == 4
    assert "eks:UpdateNodegroupConfig on it" in outcome.message
    assert f"the budget's action denies it: IAM policy millrace-{REGION}-over-budget" in outcome.message
    assert world.clock.now - began < 60
    assert is_down(world)


def test_a_group_that_is_gone_is_told_and_holds_nothing(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    def attempt(number: int) -> DriverState:
        cloud.delete()
        return ended(0)

    world.attempt = attempt
    assert reconcile() == Outcome(0, "done")
    assert is_down(world)
    outcome = reconcile(id="def456")
    assert outcome.exit_code == 4
    assert "CLUSTER_NAME and the groups' names" in outcome.message


def test_a_group_that_is_looked_for_in_another_region_keeps_its_share(
    world: World, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """EKS then says of it what it says of one that was deleted. Its nodes are ready, and are to be lowered one day."""
    hold(world, "trainer", 2)
    world.pass_time()
    refusal = Refusal("DescribeNodegroup", 404, "ResourceNotFoundException")
    with pytest.raises(eks.NodeGroupAbsent, match=r"Yet 2 nodes of it are ready.*mend REGION"):
        give_back(world, "trainer")
    refusal.end()
    assert held(world) == {"trainer": 2}
    give_back(world, "trainer")
    assert (cloud.size, held(world)) == (0, {})


def test_a_reaper_goes_on_when_eks_does_not_answer(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would come again in a quarter of an hour only."""
    monkeypatch.setattr(reaper, "connect_patiently", lambda: world.api)
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    hold(world, "trainer", 2)
    refusal = Refusal("DescribeNodegroup", 503, "ServerException", times=4)
    assert reaper.main() == 0
    assert refusal.left == 0
    assert "reaper: describe node group millrace/trainium: ServerException" in capsys.readouterr().err
    assert (cloud.size, held(world)) == (0, {})


def test_eks_is_left_in_peace_while_it_is_busy(world: World, cloud: Cloud) -> None:
    """It answers a few calls a second for a whole account."""
    hold(world, "trainer", 2)
    refusal = Refusal("UpdateNodegroupConfig", 409, "ResourceInUseException")
    release = NodeRelease(world.api, "trainer")  # type: ignore[arg-type]
    calls = refusal.left
    for _ in range(10):
        assert release.advance().endswith("when the update that EKS makes of it has ended")
    assert calls - refusal.left == 1
    refusal.end()
    world.clock.now += LOOK_SECONDS
    give_back(world, "trainer")
    assert (cloud.size, held(world)) == (0, {})


def test_a_process_that_slept_before_it_raised_the_group_lowers_it_again(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one took the stage down in between, and nobody else would know of the nodes."""
    pool, resize = open_node_pool(world.api, "trainer", POOL), eks.resize_node_group  # type: ignore[arg-type]
    pool.hold(2)

    def asleep(name: str, desired: int) -> None:
        monkeypatch.setattr(node_pool, "resize_node_group", resize)
        give_back(world, "trainer")
        resize(name, desired)

    monkeypatch.setattr(node_pool, "resize_node_group", asleep)
    pool.hold(2)
    assert (cloud.size, held(world)) == (0, {})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"millrace/trainium": 3}', '{"a/b": {"size_before": 0, "nodes": {"x": "1"}}}']
)
def test_a_damaged_book_of_shares_is_told(world: World, cloud: Cloud, text: str) -> None:
    hold(world, "trainer", 2)
    world.api.merge("Lease", "node-pools", {"metadata": {"annotations": {"millrace.dev/node-pools": text}}})
    with pytest.raises(DeviceError, match=r"is no book of shares: .* delete lease node-pools"):
        describe_status(world.api)  # type: ignore[arg-type]


def test_an_eks_that_does_not_answer_at_the_end_leaves_the_nodes_to_the_reaper(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    refusals: list[Refusal] = []

    def attempt(number: int) -> DriverState:
        refusals.append(Refusal("UpdateNodegroupConfig", 503, "ServerException"))
        return ended(0)

    world.attempt = attempt
    began = world.clock.now
    assert reconcile() == Outcome(0, "done")
    assert RELEASE_SECONDS < world.clock.now - began < RELEASE_SECONDS + 120
    assert "the nodes are left to the reaper" in capsys.readouterr().out
    assert (cloud.size, held(world)) == (2, {"trainer": 2})
    refusals[0].end()
    condition = {"type": "Complete", "status": "True"}
    world.api.merge("Job", "deploy-trainer", {"status": {"conditions": [condition]}})
    reap(world, 2 * ORPHAN_SECONDS)
    assert cloud.size == 0
    assert is_down(world)


def test_a_budget_that_denies_the_lowering_leaves_the_nodes_to_the_reaper_at_once(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget's action takes the right from the deploy Job while a stage runs; the reaper keeps it."""
    refusals: list[Refusal] = []

    def attempt(number: int) -> DriverState:
        refusals.append(Refusal("UpdateNodegroupConfig", 403, "AccessDeniedException"))
        return ended(0)

    world.attempt = attempt
    began = world.clock.now
    assert reconcile() == Outcome(0, "done")
    assert world.clock.now - began < 120
    said = capsys.readouterr().out
    assert f"IAM policy millrace-{REGION}-over-budget" in said
    assert "The nodes are left to the reaper" in said
    assert said.count("--nodegroup-name trainium --scaling-config desiredSize=0") == 1
    assert (cloud.size, held(world)) == (2, {"trainer": 2})
    refusals[0].end()
    condition = {"type": "Complete", "status": "True"}
    world.api.merge("Job", "deploy-trainer", {"status": {"conditions": [condition]}})
    reap(world, 2 * ORPHAN_SECONDS)
    assert cloud.size == 0
    assert is_down(world)


def test_after_a_reservation_no_node_is_asked_for(
    world: World, cloud: Cloud, reconcile: Callable[..., Outcome]
) -> None:
    outcome = reconcile(capacity_ends_at="2026-01-31T12:00:00Z")
    assert outcome.exit_code == 75
    assert "AWS takes its nodes away from 2026-01-31T11:20Z on" in outcome.message
    assert cloud.sizes == [0]


def test_a_status_tells_who_holds_which_nodes(world: World, cloud: Cloud, reconcile: Callable[..., Outcome]) -> None:
    statuses: list[str] = []

    def attempt(number: int) -> DriverState:
        statuses.append(describe_status(world.api))  # type: ignore[arg-type]
        return ended(0)

    world.attempt = attempt
    reconcile()
    assert f"nodes     node group {POOL}: 2 of 2 are ready; trainer holds 2" in statuses[0]
    assert f"nodes     node group {POOL}: no stage holds any, 0 are ready" in describe_status(world.api)  # type: ignore[arg-type]


def test_of_two_stages_the_last_one_lowers_the_group(world: World, cloud: Cloud) -> None:
    """EKS chooses which nodes end, and would end those of the stage that stays."""
    hold(world, "tokenizer", 1)
    hold(world, "compiler", 2)
    assert cloud.size == 3
    give_back(world, "compiler")
    assert (cloud.size, held(world)) == (3, {"tokenizer": 1})
    hold(world, "compiler", 2)
    assert cloud.size == 3, "its nodes are still there"
    give_back(world, "tokenizer")
    give_back(world, "compiler")
    assert (cloud.size, held(world)) == (0, {})


def test_a_stage_that_the_group_has_no_room_for_waits(world: World, cloud: Cloud) -> None:
    hold(world, "tokenizer", 3)
    pool = open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]
    for _ in range(4):
        pool.hold(2)
    assert pool.look(2).report == f"node group {POOL} would have 5 nodes, and may have 4; tokenizer holds 3"
    assert open_node_pool(world.api, "tokenizer", POOL).look(3).is_raised, "its retry does not wait for the other"  # type: ignore[arg-type]
    give_back(world, "tokenizer")
    hold(world, "compiler", 2)
    assert (held(world), cloud.size) == ({"compiler": 2}, 2)


def test_a_stage_that_comes_while_another_leaves_has_its_nodes(make_world: Callable[[], World], cloud: Cloud) -> None:
    """In whatever order the two do their steps."""
    for released in itertools.combinations(range(7), 3):
        world = make_world()
        hold(world, "tokenizer", 2)
        pool = open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]
        release = NodeRelease(world.api, "tokenizer")  # type: ignore[arg-type]
        for step in range(7):
            if step in released:
                release.advance()
            elif not pool.look(2).is_raised:
                pool.hold(2)
        give_back(world, "tokenizer")
        while not pool.look(2).is_raised:
            pool.hold(2)
        assert (held(world), cloud.size >= 2) == ({"compiler": 2}, True), released
        give_back(world, "compiler")
        assert cloud.size == 0


def test_a_stage_that_comes_at_the_moment_of_the_lowering_raises_again(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between another's look at the shares and its call of EKS."""
    hold(world, "tokenizer", 2)
    resize, compiler = eks.resize_node_group, open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]

    def slow(name: str, desired: int) -> None:
        monkeypatch.setattr(node_pool, "resize_node_group", resize)
        compiler.hold(2)
        resize(name, desired)

    monkeypatch.setattr(node_pool, "resize_node_group", slow)
    give_back(world, "tokenizer")
    assert cloud.size == 0
    assert not compiler.look(2).is_raised
    compiler.hold(2)
    assert compiler.look(2).is_raised
    assert cloud.size == 2


def test_two_stages_that_write_at_once_lose_no_share(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_share_book
    late = open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]

    def interrupted(api: Any) -> Any:
        book = read(api)
        monkeypatch.setattr(node_pool, "read_share_book", read)
        hold(world, "tokenizer", 1)
        return book

    monkeypatch.setattr(node_pool, "read_share_book", interrupted)
    with pytest.raises(Conflict):
        late.hold(2)
    assert held(world) == {"tokenizer": 1}
    hold(world, "compiler", 2)
    assert held(world) == {"tokenizer": 1, "compiler": 2}


def hold(world: World, stage: str, nodes: int) -> None:
    pool = open_node_pool(world.api, stage, POOL)  # type: ignore[arg-type]
    while not pool.look(nodes).is_raised:
        pool.hold(nodes)


def give_back(world: World, stage: str) -> None:
    release = NodeRelease(world.api, stage)  # type: ignore[arg-type]
    while release.advance():
        pass
