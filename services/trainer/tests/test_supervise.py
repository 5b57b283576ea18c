"""A command starts lost workers again, up to its limit, unless a signal, a stop file or a time limit stops it."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.common.testing.waiting import wait_until
from services.trainer.job import Job
from services.trainer.metrics.events import read_events
from services.trainer.metrics.records import METRICS_FILE
from services.trainer.supervision.restarts import RestartPolicy
from services.trainer.supervision.stop import (
    STOP_FILE,
    StopConditions,
    clear_stop,
    forget_signals,
    read_request,
    request_stop,
    stopped,
)
from services.trainer.supervision.supervise import supervise, train_on_node
from services.trainer.tests.fake_launcher import FakeLauncher
from services.trainer.tests.metric_lines import STEP, append
from services.trainer.tests.runs import REPOSITORY
from services.trainer.workers.start import describe_workers

ALONE = WorkerEnvironment(rank=0, world_size=1)
KILLED = "rank 1 (pid 7 on node) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("error", "starts"), [(WorkersLost(KILLED), 3), (NoRoomForWorkers("no room for 2"), 1), (ArtifactError("x"), 1)]
)
def test_lost_workers_are_started_again_but_none_after_another_error(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, error: MillraceError, starts: int
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


@pytest.mark.parametrize(
    ("device", "workers_per_node", "logical_core_size"), [("cpu", None, None), ("neuron", 64, 2), ("neuron", 128, 1)]
)
def test_the_launcher_gets_the_workers_their_cores_and_what_the_run_keeps(
    new_job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    workers_per_node: int | None,
    logical_core_size: int | None,
) -> None:
    job, launcher = new_job(train__max_restarts="2"), FakeLauncher.use(monkeypatch)
    cluster = {"trainer_workers_per_node": workers_per_node, "trainer_instance_type": "trn2.48xlarge"}
    parts = {
        "parallel": job.recipe.parallel.model_copy(update={"device": device}),
        "cluster": job.recipe.cluster.model_copy(update=cluster if workers_per_node else {}),
    }
    recipe = job.recipe.model_copy(update=parts)
    supervise(replace(job, recipe=recipe))

    (group,) = launcher.groups
    assert group.spec == describe_workers(recipe, job.run_folder, f"millrace-{job.attempt}")
    assert (group.spec.num_workers, group.spec.device, group.spec.logical_core_size) == (2, device, logical_core_size)
    assert (group.max_node_losses, group.name) == (2, job.run)
    assert job.checkpoint_collection.relative_to(group.storage_path or "") == Path(job.run)
    pickle.loads(pickle.dumps(group)).stop()
    assert read_request(job.run_folder) is StopReason.PREEMPTION


def test_a_restart_policy_on_another_node_goes_on_counting(new_job: Callable[..., Job]) -> None:
    """Ray Train starts the nodes anew after a loss, with the policy as it was when the command began."""
    job = new_job()
    assert [RestartPolicy(job)(cause) for cause in ("", *["node 1 of the workers was lost"] * 3)] == [0, 1, 2, 3]
    assert [each["start"] for each in read_events(job.run_folder)] == [0, 1, 2]


def test_restarts_are_counted_since_the_newest_checkpoint_and_each_has_a_start_time_of_its_own(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
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


def test_what_workers_are_forked_with_leaves_no_thread(new_job: Callable[..., Job]) -> None:
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
    new_job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    reason: StopReason,
    kind: type[MillraceError] | None,
    starts: int,
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
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(job: Job) -> None:
        append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until((job.run_folder / STOP_FILE).exists)

    FakeLauncher.use(monkeypatch, complete)
    job = new_job()
    supervise(job)
    assert not (job.run_folder / STOP_FILE).exists()


def test_a_worker_whose_device_fails_says_so(new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, environment: WorkerEnvironment) -> None:
        raise RuntimeError("nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE")

    monkeypatch.setattr("services.trainer.supervision.supervise.train", fail)
    job = new_job()
    with pytest.raises(HardwareFault, match=re.escape(socket.gethostname())):
        train_on_node(job, ALONE)


@pytest.mark.parametrize("content", [b"", "SIGTERM\r\n".encode("utf-16"), b"NONE"], ids=["empty", "PowerShell", "text"])
def test_a_file_of_any_content_is_a_request_and_is_used_up(new_job: Callable[..., Job], content: bytes) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE).write_bytes(content)

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.STOP_FILE

    clear_stop(job.run_folder)
    assert not (job.run_folder / STOP_FILE).exists()
    assert StopConditions(job, ALONE).check() is StopReason.NONE


@pytest.mark.parametrize(
    ("reason", "error"),
    [(StopReason.PREEMPTION, TryAgain), (StopReason.SIGTERM, TryAgain), (StopReason.INTERRUPT, Interrupted)],
)
def test_a_signal_of_the_command_has_its_error_and_does_not_stop_the_next_command(
    new_job: Callable[..., Job], reason: StopReason, error: type[MillraceError]
) -> None:
    job = new_job()
    request_stop(job.run_folder, reason)
    assert StopConditions(job, ALONE).check() is reason
    assert StopConditions(job, WorkerEnvironment(rank=1, world_size=2)).check() is StopReason.NONE  # rank 0 looks

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.NONE
    assert type(stopped(reason, "after step 7")) is error


def test_of_several_requests_the_strongest_stays(new_job: Callable[..., Job]) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE).touch()
    for reason, expected in (
        (StopReason.STOP_FILE, StopReason.STOP_FILE),
        (StopReason.PREEMPTION, StopReason.PREEMPTION),
        (StopReason.INTERRUPT, StopReason.INTERRUPT),
        (StopReason.PREEMPTION, StopReason.INTERRUPT),
    ):
        request_stop(job.run_folder, reason)
        assert StopConditions(job, ALONE).check() is expected
