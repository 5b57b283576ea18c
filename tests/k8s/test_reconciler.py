"""Whole deployments against a small world in memory: evictions, dead nodes, retries, orphans, what a record keeps."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from ray.job_submission import JobStatus

from deploy.good_images import read_good_images
from k8s.client.status import describe_status
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import ORPHAN_SECONDS
from k8s.controller.reconciler import SETTLE_SECONDS, Reconciler
from k8s.objects.record import ask_to_stop
from k8s.objects.worker_group import read_worker_group
from tests.k8s.builders import READY, Clock, pod
from tests.k8s.rendered import Thing
from tests.k8s.world import DARK, LOST, Reconcile, World, complete_job, ended, orphan, reap


@pytest.fixture
def make_world(eks_cluster: Thing, clock: Clock) -> Callable[[], World]:
    return lambda: World(eks_cluster, clock, nodes=2)


def test_a_run_that_commits_checkpoints_outlives_any_number_of_evictions(
    world: World, reconcile: Reconcile, tmp_path: Path
) -> None:
    def attempt(number: int) -> DriverState:
        folder = tmp_path / f"checkpoint/small-0123abcd/step-{100 * number:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
        return LOST if number < 9 else ended(0)

    world.attempt = attempt
    assert reconcile(retries=3).exit_code == 0
    assert len(world.record.attempts) == 9
    assert [each.progressed for each in world.record.attempts] == [True] * 9
    assert world.is_down


def test_pods_that_have_joined_ray_are_enough_and_others_that_ray_remembers_do_not_count(
    world: World, reconcile: Reconcile
) -> None:
    """The operator's probe calls a pod ready 10 s after its start or later."""
    world.conditions = []
    assert reconcile().exit_code == 0
    world.ghosts = {"a pod that is gone", "another"}
    world.set_node("n1", *DARK)
    assert reconcile(id="def456", start_timeout_seconds=60).exit_code == 75


def test_no_attempt_begins_on_a_node_whose_hardware_has_failed(
    world: World, reconcile: Reconcile, clock: Clock
) -> None:
    """The driver's 75 names the fault, and the node's agent says so; a quarter of an hour later it is repaired."""
    fault = {"type": "AcceleratedHardwareReady", "status": "False"}
    began: list[float] = []

    def attempt(number: int) -> DriverState:
        began.append(clock.now)
        if number == 1:
            world.set_node("n1", [], [READY, fault])
        return ended(75 if number == 1 else 0)

    def repair() -> None:
        if began and clock.now > began[0] + 1_000:
            world.set_node("n1", [], [READY])

    world.attempt, world.watch = attempt, repair
    assert reconcile().exit_code == 0
    assert len(world.record.attempts) == 2
    assert began[1] - began[0] > 1_000


@pytest.mark.parametrize(("age_hours", "exit_code"), [(2.0, 75), (0.5, 0)])
def test_a_limit_counts_from_the_job_s_creation_however_often_the_controller_starts(
    world: World, reconcile: Reconcile, clock: Clock, age_hours: float, exit_code: int
) -> None:
    """The limit is an hour, and the driver would run for another minute after the controller's restart."""
    orphan(world, limit_seconds=3_600)
    created_at = datetime.now(UTC) - timedelta(hours=age_hours)
    world.api.merge("Job", "deploy-trainer", {"metadata": {"creationTimestamp": created_at.isoformat()}})
    assert not world.record.stop, "a client's clock may differ from the API server's"
    until = clock.now + 60

    def finish() -> None:
        if clock.now > until:
            world.drivers["trainer-abc123-1"] = ended(0)

    world.watch = finish
    outcome = Reconciler(world.api, world.record.deployment, "pod").run()
    assert outcome
    assert outcome.exit_code == exit_code
    assert [attempt.exit_code for attempt in world.record.attempts] == [exit_code]
    assert bool(world.record.stop) == bool(exit_code)
    assert world.is_down


def test_a_ray_cluster_that_comes_late_leaves_its_driver_all_of_its_time(
    world: World, reconcile: Reconcile, clock: Clock
) -> None:
    """An isolated attempt: its Ray cluster takes 700 s, and the driver a minute after that."""
    made: list[float] = []
    name = "trainer-abc123-1"

    def bring() -> None:
        made.extend([clock.now] if not made and world.api.find("RayJob", name) else [])
        if made and clock.now > made[0] + 700 and name not in world.drivers:
            world.drivers[name] = DriverState(JobStatus.PENDING, None, "", 1)
            world.api.merge("RayJob", name, {"status": {"jobStatus": "PENDING"}})
        if made and clock.now > made[0] + 760:
            world.drivers[name] = ended(0)

    world.attempt, world.watch = lambda number: None, bring
    assert reconcile(mode="isolated").exit_code == 0
    assert [each.exit_code for each in world.record.attempts] == [0]


def test_a_job_that_ended_badly_gets_no_further_pod(world: World, reconcile: Reconcile) -> None:
    """The Job's limit is lowered to its failures so far; before that its pod is replaced however often it fails."""
    limit = world.api.find("Job", world.deploy().stage and "deploy-trainer")["spec"]["backoffLimit"]
    assert limit >= 1_000
    world.attempt = lambda number: ended(3, "millrace: no corpus")
    outcome = reconcile()
    assert (outcome.exit_code, "no corpus" in outcome.message) == (3, True)
    assert world.api.find("Job", "deploy-trainer")["spec"]["backoffLimit"] == 2


def test_without_a_spare_node_it_goes_on_with_fewer_and_takes_all_again(world: World, reconcile: Reconcile) -> None:
    """Attempt 1 loses a node, attempt 2 runs on the other, and when that attempt is lost the node is back."""
    ran: list[tuple[str, str, list[str]]] = []
    statuses: list[str] = []

    def attempt(number: int) -> DriverState:
        job = world.api.find("RayJob", f"trainer-abc123-{number}") or {}
        ran.append((job["spec"]["metadata"]["nodes"], job["spec"]["entrypoint"].rpartition(" ")[2], world.bound()))
        statuses.append(describe_status(world.api))
        world.set_node("n1", *(DARK if number == 1 else ([], [READY])))
        return LOST if number < 3 else ended(0)

    world.attempt = attempt
    reconcile(drain_seconds=60, nodes=2, fewer_nodes=(1,), workers_per_node=4, retries=3)
    root = read_worker_group(world.api, "trainer").root
    assert ran == [
        ("2", root, ["n0", "n1"]),
        ("1", "--parallel.data_parallel_size=4", ["n0"]),
        ("2", root, ["n0", "n1"]),
    ]
    assert "attempt 2 on 1 of 2 nodes" in statuses[1]
    assert "attempt 3:" in statuses[2]


def test_a_rayjob_that_the_operator_never_marks_as_ended_is_deleted(
    world: World, reconcile: Reconcile, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver succeeds, and the operator is given a while to notice."""
    monkeypatch.setattr(World, "_run_ray", lambda world: world.drivers.update({"trainer-abc123-1": ended(0)}))
    began = clock.now
    assert reconcile().exit_code == 0
    assert world.api.names("RayJob") == []
    assert clock.now - began > SETTLE_SECONDS
    assert world.is_down


@pytest.mark.usefixtures("reconcile")
def test_a_stage_that_nobody_holds_is_taken_down(world: World) -> None:
    orphan(world)
    reap(world, 10 * ORPHAN_SECONDS)
    assert world.bound() == ["n0", "n1"], "its Job is there and goes on: its next pod holds the stage"
    world.api.delete("Job", "deploy-trainer")
    reap(world, ORPHAN_SECONDS - 10)
    assert world.bound() == ["n0", "n1"], "somebody may be about to deploy it"
    reap(world, 2 * ORPHAN_SECONDS)
    assert world.is_down
    assert world.api.names("RayJob") == []


@pytest.mark.usefixtures("reconcile")
def test_a_stage_that_somebody_works_on_is_left_alone(world: World) -> None:
    """The Job is deleted, its pod is not: that takes the stage down itself, with time for a checkpoint."""
    orphan(world)
    world.api.create(pod("leaves", "n0", "deploy"))
    world.api.delete("Job", "deploy-trainer")
    reap(world, 3 * ORPHAN_SECONDS)
    assert world.bound() == ["n0", "n1"]
    world.api.merge("Pod", "leaves", {"status": {"phase": "Failed"}})
    reap(world, 3 * ORPHAN_SECONDS)
    assert world.bound() == []


@pytest.mark.usefixtures("reconcile")
@pytest.mark.parametrize(
    ("who", "phase", "age_hours", "is_running", "is_down"),
    [
        ("ann", "Pending", 1.0, True, True),
        ("HOURS=", "Pending", 1.0, True, True),
        ("", "Pending", 1.0, False, True),  # the attempt has ended
        ("", "Pending", 1.0, True, False),
        ("ann", "Pending", 0.1, True, False),  # its node may pull the image
        ("ann", "Running", 1.0, True, False),
    ],
)
def test_a_stage_is_taken_down_whose_deploy_pod_never_starts(
    world: World, who: str, phase: str, age_hours: float, is_running: bool, is_down: bool
) -> None:
    """The pod was replaced, and asks an image that its registry has no more."""
    orphan(world, limit_seconds=60 if who == "HOURS=" else 0)
    since = (datetime.now(UTC) - timedelta(hours=age_hours)).isoformat()
    world.api.create(pod("waits", component="deploy", phase=phase, creationTimestamp=since))
    if who == "HOURS=":
        world.api.merge("Job", "deploy-trainer", {"metadata": {"creationTimestamp": since}})
    elif who:
        ask_to_stop(world.api, world.record, who)
    if not is_running:
        world.drivers["trainer-abc123-1"] = LOST
        world.pass_time()
    reap(world, 3 * ORPHAN_SECONDS)
    if is_down:
        world.api.delete("Pod", "waits", grace_seconds=0)
    assert world.is_down is is_down


def test_of_two_pods_that_deploy_a_stage_the_older_acts_first(world: World, reconcile: Reconcile, clock: Clock) -> None:
    """On a lost node it never ends, and is removed by force; tests/cluster/test_gangs.py ends others."""
    world.set_node("n9", *DARK)
    world.api.create(pod("older", "n9", "deploy"))
    world.api.delete("Pod", "older")
    began = clock.now

    def end() -> None:
        assert not world.drivers or "older" not in world.api.names("Pod")

    world.watch = end
    assert reconcile().exit_code == 0
    assert clock.now - began > 30


def test_kept_pods_stay_no_longer_than_their_job(world: World, reconcile: Reconcile) -> None:
    """That they stay as long: test_node_pools.py."""
    reconcile(keep=True)
    complete_job(world)
    world.api.delete("Job", "deploy-trainer")
    reap(world, 3 * ORPHAN_SECONDS)
    assert world.bound() == []


def test_an_image_that_ended_well_is_known_to_the_next_cluster(
    world: World, reconcile: Reconcile, tmp_path: Path
) -> None:
    """Clients read it from the RayCluster; the root keeps it where the RayCluster does not."""
    annotation = "millrace.dev/trainer-good-images"
    reconcile(image="a@sha256:1")
    assert read_worker_group(world.api, "trainer").good_images == ["a@sha256:1"]
    world.api.merge("RayCluster", "millrace", {"metadata": {"annotations": {annotation: None}}})
    reconcile(id="def456", image="a@sha256:2")
    assert read_worker_group(world.api, "trainer").good_images == ["a@sha256:1", "a@sha256:2"]
    assert read_good_images(tmp_path, "trainer") == ["a@sha256:1", "a@sha256:2"]
    (tmp_path / "deploy/trainer/good-images.json").write_text("[7]")
    assert reconcile(id="fed789", image="a@sha256:3").exit_code == 0
    assert read_worker_group(world.api, "trainer").good_images[-1] == "a@sha256:3"
