"""Tasks and workers: their results and errors come back, lost ones start again, and none outlives its parent."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.common.errors import ArtifactError, HardwareFault, RecipeError, TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import (
    Launcher,
    LostTask,
    TaskDemand,
    WorkerGroup,
    WorkerGroupSpec,
    choose_launcher,
    name_the_cause,
    run_workers,
)
from services.common.testing.commands import REPOSITORY
from services.common.testing.waiting import wait_until
from services.common.tests import work


@pytest.mark.parametrize(("num_workers", "num_tasks"), [(1, 3), (2, 5), (2, 0)])
def test_tasks_give_their_results_for_any_number_of_workers(num_workers: int, num_tasks: int) -> None:
    results = dict(inline.map_tasks(work.square, range(num_tasks), num_workers))

    assert results == {number: number**2 for number in range(num_tasks)}


def test_the_error_of_a_task_comes_back_without_waiting_for_the_others() -> None:
    with pytest.raises(ArtifactError, match="task 1 found damage"):
        list(inline.map_tasks(work.fail_or_block, [0, 1], 2))
    waiting = [1, 0]
    with pytest.raises(ArtifactError, match="task 1 found damage"):
        list(inline.run_tasks(work.fail_or_block, lambda: (waiting.pop(), TaskDemand()) if waiting else None, 2))


def test_no_process_is_forked_from_one_with_threads() -> None:
    """A lock that a thread holds would stay locked in the forked process."""

    def seen() -> set[int]:
        return set(dict(inline.map_tasks(work.process_id, range(2), 2)).values())

    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    with inline.keep_processes(2):
        is_over.set()
        thread.join()
        assert not seen() & seen()


def test_a_killed_task_is_a_lost_worker() -> None:
    with pytest.raises(WorkersLost):
        list(inline.map_tasks(work.die_or_square, [0, 1, 2], 2))


KEPT = """
import json, os
from services.common.errors import ArtifactError
from services.common.launch import inline
from services.common.tests import work

def seen() -> set[int]:
    return set(dict(inline.map_tasks(work.process_id, range(8), 2)).values())

with inline.keep_processes(2):
    kept, failure = seen() | seen(), ""
    try:
        list(inline.map_tasks(work.fail_or_block, [0, 1], 2))
    except ArtifactError as error:
        failure = str(error)
print(json.dumps([os.getpid(), sorted(kept), sorted(seen()), failure]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_the_tasks_of_several_calls_run_in_processes_that_are_kept() -> None:
    """In a process of its own: threads that other tests have left would prevent forks."""
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    own, kept, later, failure = json.loads(done.stdout)
    assert len(kept) <= 2
    assert own not in kept
    assert not set(kept) & set(later)
    assert "task 1 found damage" in failure
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in kept))


def run_until_done(launcher: Launcher, folder: Path, num_workers: int) -> tuple[dict[int, int], set[int]]:
    """Squares of 0 to 3, although task 1 dies the first time; and which tasks were lost."""
    waiting, lost, results = [3, 2, 1, 0], set(), {}

    def take() -> tuple[tuple[int, Path], TaskDemand] | None:
        return ((waiting.pop(), folder), TaskDemand(num_cpus=1, memory_bytes=2**20)) if waiting else None

    for ended in launcher.run_tasks(work.die_once_or_square, take, num_workers):
        if ended is not None:
            (number, _), result = ended
            if isinstance(result, LostTask):
                lost.add(number)
                waiting.append(number)
            else:
                results[number] = result
    return results, lost


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_caller_runs_a_lost_task_again(tmp_path: Path, num_workers: int) -> None:
    results, lost = run_until_done(choose_launcher("inline"), tmp_path, num_workers)

    assert results == {0: 0, 1: 1, 2: 4, 3: 9}
    assert 1 in lost


def test_more_memory_than_the_machine_has_is_no_room() -> None:
    assert inline.has_room(TaskDemand(memory_bytes=2**20))
    assert not inline.has_room(TaskDemand(memory_bytes=2**60))


@pytest.mark.parametrize("given", ["nonsense", "head:port", "head:0", ":6379", "ray://head:10001", "a b:6379"])
def test_a_ray_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)

    with pytest.raises(RecipeError, match="RAY_ADDRESS"):
        cluster_address()


@pytest.mark.parametrize("given", ["127.0.0.1:1", "no-such-host.invalid:6379", "auto"])
def test_a_cluster_that_is_not_there_ends_the_command_with_75(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("services.common.launch.ray_cluster.JOIN_SECONDS", 0.0)
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", set)  # other commands' on this machine
    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")

    with pytest.raises(TryAgain, match=given):
        list(choose_launcher("ray").map_tasks(work.square, range(2), 2))


PRELOAD = ("services.common.tests.work",)
LOST = WorkersLost("a peer was lost")
DAMAGE = ArtifactError("damage")
FAULT = HardwareFault("a NeuronCore failed")
BUG = KeyError("bug")
DISK = OSError(28, "No space left on device")
RESET = ConnectionResetError("by peer")


@pytest.fixture
def spec(tmp_path: Path) -> WorkerGroupSpec:
    """A group of two forks of a process with their imports."""
    return WorkerGroupSpec(2, 1, 2, tmp_path, preload=PRELOAD)


# Workers are new interpreters, or forks of a process with their imports.
@pytest.mark.parametrize("preload", [(), PRELOAD], ids=["started", "forked"])
def test_workers_know_their_places_and_have_the_variables_of_the_command(
    tmp_path: Path, spec: WorkerGroupSpec, monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MILLRACE_AFTER", "the fork server's start")

    run_workers(inline, work.write_environment, tmp_path, replace(spec, preload=preload))

    found = work.read_environments(tmp_path)
    assert [each["MILLRACE_AFTER"] for each in found] == ["the fork server's start"] * 2
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    assert [[each[name] for name in places] for each in found] == [list("020201"), list("121201")]


@pytest.mark.parametrize("message", ["rank 1 found damage", "much " * 19_000])
def test_the_error_of_a_worker_comes_back_as_itself(spec: WorkerGroupSpec, message: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        run_workers(inline, work.raise_on_last_rank, message, spec)

    assert str(caught.value) == message


def test_a_killed_worker_is_named_with_its_signal_and_a_bug_is_itself(spec: WorkerGroupSpec) -> None:
    with pytest.raises(WorkersLost, match=r"rank 1 .*SIGKILL"):
        run_workers(inline, work.die_on_last_rank, None, spec)
    with pytest.raises(KeyError, match="bug"):
        run_workers(inline, work.fail_with_a_bug, None, spec)


class Plan:
    """Allows some restarts, and keeps what it was told."""

    def __init__(self, restarts: int) -> None:
        self.losses: list[str] = []
        self._restarts = restarts

    def __call__(self, loss: str) -> int:
        self.losses.append(loss)
        if len(self.losses) > self._restarts + 1:
            raise HardwareFault("enough")
        return len(self.losses) - 1


@pytest.mark.parametrize(("restarts", "is_enough"), [(2, True), (1, False)])
def test_lost_workers_start_again_as_long_as_the_caller_says(
    tmp_path: Path, spec: WorkerGroupSpec, restarts: int, is_enough: bool
) -> None:
    """Workers of each start form a group of their own, and meet none of the start before."""
    plan = Plan(restarts)
    group = WorkerGroup(pickle.dumps((work.die_in_two_starts, tmp_path)), spec, plan)

    if is_enough:
        inline.run_workers(group)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-start-2", "rank-1-start-2"]
    else:
        with pytest.raises(HardwareFault):
            inline.run_workers(group)

    assert plan.losses[0] == ""
    assert all("rank 1 " in loss and "SIGKILL" in loss for loss in plan.losses[1:])
    assert len(plan.losses) == 3


def test_a_definite_error_restarts_nothing(spec: WorkerGroupSpec) -> None:
    plan = Plan(5)

    with pytest.raises(ArtifactError):
        inline.run_workers(WorkerGroup(pickle.dumps((work.raise_on_last_rank, "damage")), spec, plan))

    assert plan.losses == [""]


@pytest.mark.parametrize("preload", [(), PRELOAD], ids=["started", "forked"])
def test_workers_have_own_sessions_and_end_with_a_killed_program(tmp_path: Path, preload: tuple[str, ...]) -> None:
    """A signal to the command's group, as a terminal's Ctrl-C, reaches the command alone."""
    command = [sys.executable, "-m", "services.common.tests.stage", "workers", str(tmp_path), *preload]
    parent = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        assert [os.getsid(pid) for pid in pids] == pids
        started = psutil.Process(parent.pid).children(recursive=True)
    finally:
        parent.kill()
        parent.wait()

    wait_until(lambda: not any(process.is_running() for process in started))


@pytest.mark.parametrize(
    ("raised", "lost", "expected"),
    [
        ([LOST, DAMAGE], None, DAMAGE),
        ([LOST, DAMAGE, pickle.loads(pickle.dumps(FAULT))], "rank 2 died", FAULT),
        ([LOST, BUG], None, BUG),
        ([RESET, DISK], None, DISK),
        ([BUG, DAMAGE], "rank 2", DAMAGE),
        ([LOST], None, LOST),
        *((raised, "rank 1 ended with -9", TryAgain("rank 1 ended with -9")) for raised in ([], [LOST], [RESET])),
    ],
)
def test_of_several_failures_the_one_that_caused_the_others_is_raised(
    raised: list[Exception], lost: str | None, expected: Exception
) -> None:
    cause = name_the_cause(raised, lost)

    assert (isinstance(cause, type(expected)), str(cause)) == (True, str(expected))


@pytest.mark.slow
def test_ray_keeps_the_same_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts once for all of these promises, because its start takes longer than all other tests."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "")  # as good as none
    launcher = choose_launcher("ray")
    try:
        run_workers(launcher, work.write_environment, tmp_path, WorkerGroupSpec(2, 1, 2, tmp_path, device="xla"))
        cores = [each["NEURON_RT_VISIBLE_CORES"] for each in work.read_environments(tmp_path)]
        assert cores == ["0", "1"]
        assert dict(launcher.map_tasks(work.square, range(3), 2)) == {0: 0, 1: 1, 2: 4}
        assert run_until_done(launcher, tmp_path, 2) == ({0: 0, 1: 1, 2: 4, 3: 9}, {1})
        assert launcher.has_room(TaskDemand(memory_bytes=2**20))
        with pytest.raises(ArtifactError, match="task 1 found damage"):
            list(launcher.map_tasks(work.fail_or_block, [0, 1], 2))
        with pytest.raises(ArtifactError, match="a worker found damage"):
            run_workers(launcher, work.raise_on_last_rank, "a worker found damage", WorkerGroupSpec(1, 1, 1, tmp_path))
        with pytest.raises(WorkersLost):
            run_workers(launcher, work.die_on_last_rank, None, WorkerGroupSpec(1, 1, 1, tmp_path))
    finally:
        ray.shutdown()
