"""Tasks and workers: their results come back, their errors come back as themselves, and none outlives its parent."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from services.common.errors import ArtifactError, RecipeError, TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import (
    Launcher,
    LostTask,
    TaskDemand,
    WorkerGroupSpec,
    choose_launcher,
    run_workers,
)
from services.common.testing.waiting import wait_until
from services.common.tests import work
from services.common.tests.builders import REPOSITORY

LOST = WorkersLost("a peer was lost")
DAMAGE = ArtifactError("damage")
BUG = KeyError("bug")
DISK = OSError(28, "No space left on device")
RESET = ConnectionResetError("by peer")


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_tasks_give_their_results_for_any_number_of_workers(num_workers: int) -> None:
    results = dict(inline.map_tasks(work.square, range(5), num_workers))

    assert results == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}


def test_no_tasks_give_no_results() -> None:
    assert list(inline.map_tasks(work.square, [], 2)) == []


def test_the_error_of_a_task_comes_back_without_waiting_for_the_others() -> None:
    with pytest.raises(ArtifactError, match="task 1 found damage"):
        list(inline.map_tasks(work.fail_or_block, [0, 1], 2))


def test_a_killed_task_is_a_lost_worker() -> None:
    with pytest.raises(WorkersLost):
        list(inline.map_tasks(work.die_or_square, [0, 1, 2], 2))


def run_in_kept_processes() -> set[int]:
    return set(dict(inline.map_tasks(work.process_id, range(8), 2)).values())


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


def test_no_process_is_forked_from_one_with_threads() -> None:
    """A lock that a thread holds would stay locked in the forked process."""
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    with inline.keep_processes(2):
        is_over.set()
        thread.join()
        first, second = run_in_kept_processes(), run_in_kept_processes()
    assert not first & second


KEEPING = """
import os, sys, time
from services.common.launch import inline
from services.common.tests import work
with inline.keep_processes(2):
    print(*set(dict(inline.map_tasks(work.process_id, range(8), 2)).values()), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_kept_processes_end_with_a_killed_command() -> None:
    command = subprocess.Popen([sys.executable, "-c", KEEPING], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    seen = [int(pid) for pid in command.stdout.readline().split()]
    assert seen
    command.kill()
    command.communicate()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in seen))


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


def test_the_error_of_a_task_that_was_taken_comes_back_without_waiting_for_the_others() -> None:
    waiting = [1, 0]
    with pytest.raises(ArtifactError, match="task 1 found damage"):
        for _ in inline.run_tasks(work.fail_or_block, lambda: (waiting.pop(), TaskDemand()) if waiting else None, 2):
            pass


def test_more_memory_than_the_machine_has_is_no_room() -> None:
    assert inline.has_room(TaskDemand(memory_bytes=2**20))
    assert not inline.has_room(TaskDemand(memory_bytes=2**60))


def test_a_ray_cluster_that_cannot_be_reached_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("services.common.launch.ray_cluster.JOIN_SECONDS", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    with pytest.raises(TryAgain, match=r"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1 \(.*refused"):
        list(choose_launcher("ray").map_tasks(work.square, range(2), 2))


@pytest.mark.parametrize(
    "given",
    [
        "nonsense",
        "local",
        "head:port",
        "head:0",
        "head:70000",
        ":6379",
        "http://head:6379",
        "ray://head:10001",
        "user@head:6379",
        "head..name:6379",
        "a b:6379",
        "\udcff:6379",
    ],
)
def test_a_ray_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)

    with pytest.raises(RecipeError, match=r"RAY_ADDRESS=(.|\n)*HOST:PORT"):
        cluster_address()


@pytest.mark.parametrize("given", ["head:6379", "10.0.0.1:6379", "[::1]:6379", "auto"])
def test_a_cluster_is_joined_where_ray_address_names_one(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)

    assert cluster_address() == given


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_ray_address_names_none(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)

    assert cluster_address() is None


@pytest.mark.parametrize("given", ["no-such-host.invalid:6379", "auto"])
def test_a_cluster_that_is_not_there_ends_the_command_with_75(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("services.common.launch.ray_cluster.JOIN_SECONDS", 0.0)
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", set)  # other commands' on this machine
    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")

    with pytest.raises(TryAgain, match=f"no Ray cluster answers at RAY_ADDRESS={given} "):
        list(choose_launcher("ray").map_tasks(work.square, range(2), 2))


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
