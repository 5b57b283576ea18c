"""Tasks and workers: their results come back, their errors come back as themselves, and none outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from services.common.errors import ArtifactError, RecipeError, TryAgain, WorkersLost
from services.common.launch import fork_server, inline
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import (
    Launcher,
    LostTask,
    TaskDemand,
    WorkerGroupSpec,
    choose_launcher,
    name_the_cause,
    run_workers,
)
from services.common.process.command_line import StageParser
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


@pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="forks on Linux alone")
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


@pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="forks on Linux alone")
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


PRELOAD = ("services.common.tests.work",)


@pytest.fixture(params=[(), PRELOAD], ids=["started", "forked"])
def new_spec(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], WorkerGroupSpec]:
    """Return a maker of groups whose workers are new interpreters, or forks of a process with their imports."""
    return lambda num_workers: WorkerGroupSpec(num_workers, 1, num_workers, tmp_path, preload=request.param)


def test_workers_know_their_rank(tmp_path: Path, new_spec: Callable[[int], WorkerGroupSpec]) -> None:
    run_workers(inline, work.write_rank, tmp_path, new_spec(2))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-2-on-0", "1-of-2-on-1"]


def test_workers_of_a_node_share_a_folder_until_they_end(
    tmp_path: Path, new_spec: Callable[[int], WorkerGroupSpec]
) -> None:
    run_workers(inline, work.write_place, tmp_path, new_spec(2))

    first, second = work.read_environments(tmp_path)
    assert first == second
    assert first[:3] == [2, 0, 1]
    assert not Path(first[3]).exists()


@pytest.mark.parametrize("message", ["rank 1 found damage", "much " * 19_000])
def test_the_error_of_a_worker_comes_back_as_itself(new_spec: Callable[[int], WorkerGroupSpec], message: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        run_workers(inline, work.raise_on_last_rank, message, new_spec(2))

    assert str(caught.value) == message


def test_a_bug_of_a_worker_comes_back_as_itself(new_spec: Callable[[int], WorkerGroupSpec]) -> None:
    with pytest.raises(KeyError, match="bug"):
        run_workers(inline, work.fail_with_a_bug, None, new_spec(1))


def test_a_killed_worker_ends_the_group(new_spec: Callable[[int], WorkerGroupSpec]) -> None:
    with pytest.raises(WorkersLost, match=r"rank 1 \(pid \d+ on .*\) was killed by SIGKILL"):
        run_workers(inline, work.die_on_last_rank, None, new_spec(2))


def test_workers_have_the_variables_of_the_command(
    tmp_path: Path, new_spec: Callable[[int], WorkerGroupSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers get the environment of the moment in which they start, not of the preparation."""
    monkeypatch.setenv("MILLRACE_BEFORE", "yes")
    inline.prepare(new_spec(1))
    monkeypatch.delenv("MILLRACE_BEFORE")
    monkeypatch.setenv("MILLRACE_AFTER", "yes")

    run_workers(inline, work.write_environment, tmp_path, new_spec(1))

    (environment,) = work.read_environments(tmp_path)
    assert "MILLRACE_BEFORE" not in environment
    assert environment["MILLRACE_AFTER"] == "yes"


@pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="workers are forked on Linux alone")
def test_workers_are_forked_again_after_the_process_was_killed_that_forks_them(tmp_path: Path) -> None:
    with inline.open_workers(WorkerGroupSpec(2, 1, 2, tmp_path, preload=PRELOAD)) as workers:
        with pytest.raises(WorkersLost, match=r"rank \d \(pid \d+ on .*\)"):
            workers.run(work.kill_parent, None)

        workers.run(work.write_rank, tmp_path)

    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="workers are forked on Linux alone")
def test_workers_start_although_the_process_that_forks_them_is_being_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a killed process a moment later, and the command may ask for a fork before."""
    start, killed = fork_server.ForkedProcess.start, list[int]()

    def start_after_kill(process: fork_server.ForkedProcess) -> None:
        if not killed:
            killed.append(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
            os.kill(killed[0], signal.SIGKILL)
            raise EOFError
        start(process)

    monkeypatch.setattr(fork_server.ForkedProcess, "start", start_after_kill)
    run_workers(inline, work.write_rank, tmp_path, WorkerGroupSpec(1, 1, 1, tmp_path, preload=PRELOAD))

    assert killed
    assert [path.name for path in tmp_path.iterdir()] == ["0-of-1-on-0"]


@pytest.mark.skipif(not fork_server.IS_SUPPORTED, reason="workers are forked on Linux alone")
def test_what_cannot_be_imported_before_fails_where_it_is_used(tmp_path: Path) -> None:
    run_workers(inline, work.write_rank, tmp_path, WorkerGroupSpec(1, 1, 1, tmp_path, preload=("no.such.module",)))

    assert [path.name for path in tmp_path.iterdir()] == ["0-of-1-on-0"]


@pytest.fixture(params=[(), PRELOAD], ids=["started", "forked"])
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that has started two workers."""
    command = [sys.executable, "-m", "services.common.tests.stage", "workers", str(tmp_path), *request.param]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    yield process
    process.kill()
    process.wait()


def test_nothing_is_left_of_a_program_that_is_killed(parent: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(parent.pid).children(recursive=True)
    assert len(started) >= 2
    parent.kill()

    wait_until(lambda: not any(process.is_running() for process in started))


@pytest.mark.parametrize(
    ("raised", "lost", "expected"),
    [
        ([LOST, DAMAGE], None, DAMAGE),
        ([LOST, BUG], None, BUG),
        ([RESET, DISK], None, DISK),
        ([BUG, DAMAGE], "rank 2", DAMAGE),
        ([LOST], None, LOST),
    ],
)
def test_of_several_failures_the_one_that_caused_the_others_is_raised(
    raised: list[Exception], lost: str | None, expected: Exception
) -> None:
    assert name_the_cause(raised, lost) is expected


@pytest.mark.parametrize("raised", [[], [LOST], [RESET], [RuntimeError("connection closed")]])
def test_a_dead_worker_explains_what_its_peers_raise(raised: list[Exception]) -> None:
    cause = name_the_cause(raised, "rank 1 ended with -9")

    assert isinstance(cause, TryAgain)
    assert str(cause) == "rank 1 ended with -9"


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


@pytest.mark.parametrize(
    ("address", "options", "expected"),
    [
        ("", (), "inline"),
        ("", ("--launch=ray",), "ray"),
        ("head:6379", (), "ray"),
        ("head:6379", ("--launch=inline",), "inline"),
        ("nonsense", ("--launch=inline",), "inline"),
    ],
)
def test_a_command_uses_ray_where_ray_address_names_a_cluster_and_plain_processes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, address: str, options: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    parser = StageParser("trainer", "")
    parser.add_launch()

    assert parser.parse_known_args(["--recipe=none.toml", *options])[0].launch == expected


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
        spec = WorkerGroupSpec(2, 1, 2, tmp_path / "run", device="xla")
        launcher.prepare(replace(spec, shared_folder=tmp_path / "root"))  # before the run's name is known
        with launcher.open_workers(spec) as workers:
            workers.run(work.write_environment, tmp_path)
        assert not (tmp_path / "root").exists()
        cores = [each["NEURON_RT_VISIBLE_CORES"] for each in work.read_environments(tmp_path)]
        assert cores == ["0", "1"]
        assert dict(launcher.map_tasks(work.square, range(3), 2)) == {0: 0, 1: 1, 2: 4}
        assert run_until_done(launcher, tmp_path, 2) == ({0: 0, 1: 1, 2: 4, 3: 9}, {1})
        assert launcher.has_room(TaskDemand(memory_bytes=2**20))
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        with pytest.raises(ArtifactError, match="task 1 found damage"):
            list(launcher.map_tasks(work.fail_or_block, [0, 1], 2))
        with pytest.raises(ArtifactError, match="a worker found damage"):
            run_workers(launcher, work.raise_on_last_rank, "a worker found damage", WorkerGroupSpec(1, 1, 1, tmp_path))
        with pytest.raises(WorkersLost):
            run_workers(launcher, work.die_on_last_rank, None, WorkerGroupSpec(1, 1, 1, tmp_path))
    finally:
        ray.shutdown()
