"""A command starts lost workers again, up to its limit, unless something stops it, and tells its operators."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.common.errors import (
    ArtifactError,
    HardwareFault,
    Interrupted,
    MillraceError,
    NoRoomForWorkers,
    TryAgain,
    WorkersLost,
)
from services.common.launch.launcher import WorkerEnvironment, WorkerGroup
from services.common.process.entry_point import exit_code_of
from services.common.process.shutdown import Stopped, StopReason
from services.common.recipe.schema import WEBHOOK_VARIABLE
from services.common.testing.waiting import wait_until
from services.common.testing.webhooks import Receiver, receiving
from services.trainer.job import Job
from services.trainer.metrics.events import read_events, record_event
from services.trainer.metrics.records import METRICS_FILE
from services.trainer.supervision.restarts import RestartPolicy
from services.trainer.supervision.stop import (
    STOP_FILE,
    StopConditions,
    clear_stop,
    forget_signals,
    read_request,
    request_stop,
)
from services.trainer.supervision.supervise import notifying_run, supervise, train_on_node
from services.trainer.tests.builders import ALONE, NewJob
from services.trainer.tests.metric_lines import STEP, append
from services.trainer.tests.runs import REPOSITORY
from services.trainer.workers.start import describe_workers

KILLED = "rank 1 (pid 7 on node) was killed by SIGKILL"


class FakeLauncher:
    """Calls a function of the test in place of the training of all workers, and keeps what the command asked for."""

    def __init__(self) -> None:
        self.groups: list[WorkerGroup] = []
        self.jobs: list[Job] = []
        """The job of each start of the workers."""

    @classmethod
    def use(cls, monkeypatch: pytest.MonkeyPatch, run: Callable[[Job], None] = lambda job: None) -> FakeLauncher:
        """Let commands of this test start their workers with a new fake launcher, and return it."""
        launcher = cls()

        def train(job: Job, environment: WorkerEnvironment) -> None:
            launcher.jobs.append(job)
            run(job)

        monkeypatch.setattr("services.trainer.supervision.supervise.train", train)
        monkeypatch.setattr("services.trainer.supervision.supervise.choose_launcher", lambda name: launcher)
        return launcher

    def run_workers(self, group: WorkerGroup) -> None:
        """See `Launcher.run_workers`. All workers are lost with the function's `WorkersLost`."""
        self.groups.append(group)
        function, argument = pickle.loads(group.work)
        number = group.restart_policy("")
        while True:
            try:
                function(argument, WorkerEnvironment(0, 1, start_number=number, started_at=time.time()))
                return
            except NoRoomForWorkers:
                raise
            except WorkersLost as lost:
                number = group.restart_policy(str(lost))


@pytest.mark.parametrize(
    ("error", "starts"), [(WorkersLost(KILLED), 3), (NoRoomForWorkers("no room for 2"), 1), (ArtifactError("x"), 1)]
)
def test_lost_workers_are_started_again_but_none_after_another_error(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, error: MillraceError, starts: int
) -> None:
    job = new_job(train__max_restarts="2")

    def fail(started: Job) -> None:
        raise error

    launcher = FakeLauncher.use(monkeypatch, fail)

    with pytest.raises(type(error), match=re.escape(str(error))):
        supervise(job)

    assert [each.start_number for each in launcher.jobs] == list(range(starts))
    restarts = [(each["event"], each["restarts"], each["cause"]) for each in read_events(job.run_folder)]
    assert restarts == [("restart", number, KILLED) for number in range(1, starts)]


def test_the_launcher_gets_the_workers_and_what_the_run_keeps(new_job: NewJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job, launcher = new_job(train__max_restarts="2"), FakeLauncher.use(monkeypatch)
    supervise(job)

    (group,) = launcher.groups
    assert group.spec == describe_workers(job.recipe, job.run_folder, f"millrace-{job.attempt}")
    assert (group.max_node_losses, group.name) == (2, job.run)
    assert job.checkpoint_collection.relative_to(group.storage_path or "") == Path(job.run)
    pickle.loads(pickle.dumps(group)).stop()
    assert read_request(job.run_folder) is StopReason.PREEMPTION


def test_a_restart_policy_on_another_node_goes_on_counting(new_job: NewJob) -> None:
    """Ray Train starts the nodes anew after a loss, with the policy as it was when the command began."""
    job = new_job()
    assert [RestartPolicy(job)(cause) for cause in ("", *["node 1 of the workers was lost"] * 3)] == [0, 1, 2, 3]
    assert [each["start"] for each in read_events(job.run_folder)] == [0, 1, 2]


def test_restarts_are_counted_since_the_newest_checkpoint_and_each_has_a_start_time_of_its_own(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a new checkpoint the command gives up after `max_restarts`."""
    job = new_job(train__max_restarts="2")
    progress, lost_at = iter([1, 2, 3, 3, 3]), list[datetime]()  # steps of the newest checkpoint at each loss

    def lose(job: Job) -> None:
        folder = job.checkpoint_address(next(progress)).path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").touch()
        lost_at.append(datetime.now(UTC))
        raise WorkersLost("rank 1 was killed")

    jobs = FakeLauncher.use(monkeypatch, lose).jobs
    with pytest.raises(WorkersLost):
        supervise(job)

    assert [each.start_number for each in jobs] == [0, 1, 2, 3, 4]
    assert all(lost <= restarted.workers_started_at for lost, restarted in zip(lost_at, jobs[1:], strict=False))
    assert {each.started_at for each in jobs} == {job.started_at}  # of the command, which the time limit counts from
    found = [(each["from_step"], each["restarts"]) for each in read_events(job.run_folder)]
    assert found == [(1, 1), (2, 1), (3, 1), (3, 2)]


def test_what_workers_are_forked_with_leaves_no_thread(new_job: NewJob) -> None:
    (module,) = describe_workers(new_job(compile__enabled="true").recipe, Path()).preload
    count = (
        f"import {module}, gc, threading; print(threading.active_count(), gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", count], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True", "True"]


@pytest.mark.parametrize(
    ("reason", "kind", "starts"),
    [
        (StopReason.PREEMPTION, TryAgain, 1),
        (StopReason.SIGTERM, TryAgain, 1),
        (StopReason.INTERRUPT, Interrupted, 1),
        (StopReason.STOP_FILE, None, 2),
    ],
)
def test_workers_that_are_lost_once_a_signal_has_asked_for_a_stop_are_not_started_again(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, reason: StopReason, kind: type[MillraceError] | None, starts: int
) -> None:
    """A person's stop file is for the workers alone, which look at it after their first step."""
    job = new_job()

    def lose_once(started: Job) -> None:
        if not started.start_number:
            request_stop(job.run_folder, reason)
            raise WorkersLost(KILLED)

    launcher = FakeLauncher.use(monkeypatch, lose_once)
    with pytest.raises(kind) if kind else nullcontext():
        supervise(job)

    assert len(launcher.jobs) == starts
    assert len(read_events(job.run_folder)) == starts - 1


def test_a_signal_after_the_last_step_leaves_no_request_to_stop(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(job: Job) -> None:
        append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until((job.run_folder / STOP_FILE).exists)

    FakeLauncher.use(monkeypatch, complete)
    job = new_job()
    supervise(job)
    assert not (job.run_folder / STOP_FILE).exists()


@pytest.mark.parametrize("has_taken_step", [True, False])
def test_a_signal_after_a_restart_waits_for_a_checkpoint_once_a_step_was_taken(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, has_taken_step: bool
) -> None:
    """However soon it comes after the step, so that the steps since the newest checkpoint are kept."""

    def lose_once(job: Job) -> None:
        if not job.start_number:
            append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
            raise WorkersLost(KILLED)
        if has_taken_step:
            record_event(job, "restarted", step=STEP["step"], seconds=1.0)
            append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal only asked for a stop")

    FakeLauncher.use(monkeypatch, lose_once)
    job = new_job()
    with pytest.raises(AssertionError if has_taken_step else Stopped):
        supervise(job)
    assert (job.run_folder / STOP_FILE).exists() is has_taken_step


def test_a_worker_whose_device_fails_says_so(new_job: NewJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, environment: WorkerEnvironment) -> None:
        raise RuntimeError("nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE")

    monkeypatch.setattr("services.trainer.supervision.supervise.train", fail)
    job = new_job()
    with pytest.raises(HardwareFault, match=re.escape(socket.gethostname())):
        train_on_node(job, ALONE)


@pytest.mark.parametrize("content", [b"", "SIGTERM\r\n".encode("utf-16"), b"NONE"], ids=["empty", "PowerShell", "text"])
def test_a_file_of_any_content_is_a_request_and_is_used_up(new_job: NewJob, content: bytes) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE).write_bytes(content)

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.STOP_FILE

    clear_stop(job.run_folder)
    assert not (job.run_folder / STOP_FILE).exists()
    assert StopConditions(job, ALONE).check() is StopReason.NONE


def test_the_strongest_request_counts_and_a_signal_does_not_stop_the_next_command(new_job: NewJob) -> None:
    job = new_job()
    for reason, expected in (
        (StopReason.STOP_FILE, StopReason.STOP_FILE),
        (StopReason.PREEMPTION, StopReason.PREEMPTION),
        (StopReason.INTERRUPT, StopReason.INTERRUPT),
        (StopReason.PREEMPTION, StopReason.INTERRUPT),
    ):
        request_stop(job.run_folder, reason)
        assert StopConditions(job, ALONE).check() is expected
    assert StopConditions(job, WorkerEnvironment(rank=1, world_size=2)).check() is StopReason.NONE  # rank 0 looks

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.NONE


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as opened:
        monkeypatch.setenv(WEBHOOK_VARIABLE, opened.url)
        yield opened


def meet_trouble(job: Job) -> None:
    record_event(job, "straggler", step=9, rank=1)
    record_event(job, "rollbacks_exhausted", step=9, rollbacks=2)
    raise WorkersLost("rank 3 was lost")


@pytest.mark.parametrize(
    ("train", "exit_code", "conditions"), [(lambda _: None, 0, ["done"]), (meet_trouble, 75, ["diverged", "failed"])]
)
def test_a_run_tells_of_its_end_and_of_the_trouble_that_it_meets(
    receiver: Receiver,
    new_job: NewJob,
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[[Job], None],
    exit_code: int,
    conditions: list[str],
) -> None:
    FakeLauncher.use(monkeypatch, train)
    job = new_job(train__max_restarts="0")

    def run() -> int:
        with notifying_run(job, Path("recipe.toml")) as observe:
            supervise(job, observe)
        return 0

    assert exit_code_of(run) == exit_code
    assert receiver.conditions == conditions
    assert all("step 9" in text for text in receiver.texts if "rollbacks" in text)
