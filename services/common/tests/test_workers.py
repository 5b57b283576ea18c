"""Workers of a group: they know their places, their errors come back as themselves, and lost ones start again."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.common.errors import ArtifactError, HardwareFault, TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerGroup, WorkerGroupSpec, name_the_cause, run_workers
from services.common.testing.waiting import wait_until
from services.common.tests import work
from services.common.tests.builders import REPOSITORY

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
