"""A command restarts lost workers, up to its limit, and gives each start a lease token of its own."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.lease import Lease, hold_lease
from services.common.errors import HardwareFault, NoRoomForWorkers, WorkersLost
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec
from services.common.testing.waiting import wait_until
from services.trainer.__main__ import begin_and_run
from services.trainer.job import Job
from services.trainer.metrics.records import METRICS_FILE
from services.trainer.stop import STOP_FILE
from services.trainer.supervise import supervise, train_on_node
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.fake_launcher import FakeLauncher
from services.trainer.tests.metric_lines import STEP, append
from services.trainer.worker_start import describe_workers


@pytest.mark.parametrize(
    ("error", "starts", "message"),
    [
        (WorkersLost("rank 1 was killed"), 3, "workers were lost 3 times, train.max_restarts is 2.*rank 1 was killed"),
        (NoRoomForWorkers("no room for 2"), 1, "^no room for 2$"),
    ],
)
def test_lost_workers_are_started_again_but_not_where_there_is_no_room(
    tmp_path: Path,
    new_job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    error: WorkersLost,
    starts: int,
    message: str,
) -> None:
    """A frozen or disconnected worker of a lost start no longer holds the lease when the next start begins."""
    attempts: list[Lease] = []

    def fail(job: Job) -> None:
        assert job.lease is not None
        attempts.append(job.lease)
        assert [attempt.is_held() for attempt in attempts] == [False] * (len(attempts) - 1) + [True]
        raise error

    launcher = FakeLauncher.use(monkeypatch, fail)
    job = new_job(train__max_restarts="2")

    with hold_lease(tmp_path / "command.lock") as held, pytest.raises(WorkersLost, match=message):
        supervise(job, held)

    assert len(launcher.jobs) == starts
    assert launcher.specs == [describe_workers(job.recipe, job.run_folder, job.attempt)]
    assert launcher.specs[0].num_workers == 2
    assert "services.trainer.supervise" in launcher.specs[0].preload
    assert "services.common.program.fingerprint:parse_source" in launcher.specs[0].preload
    for module, _, function in (each.partition(":") for each in launcher.specs[0].preload):
        assert not function or callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(("workers_per_node", "logical_core_size"), [(64, 2), (128, 1)])
def test_the_launcher_is_told_what_the_workers_compute_on(
    tmp_path: Path,
    new_job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    workers_per_node: int,
    logical_core_size: int,
) -> None:
    launcher = FakeLauncher.use(monkeypatch)
    job = new_job()
    cluster = {"trainer_workers_per_node": workers_per_node, "trainer_instance_type": "trn2.48xlarge"}
    recipe = job.recipe.model_copy(
        update={
            "parallel": job.recipe.parallel.model_copy(update={"device": "neuron"}),
            "cluster": job.recipe.cluster.model_copy(update=cluster),
        }
    )

    with hold_lease(tmp_path / "command.lock") as held:
        supervise(replace(job, recipe=recipe), held)

    place = (2, 1, workers_per_node, job.run_folder)
    assert launcher.specs == [WorkerGroupSpec(*place, "neuron", logical_core_size, kept_folder=job.attempt)]


def test_a_signal_after_the_last_step_leaves_no_request_to_stop(
    tmp_path: Path, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(job: Job) -> None:
        append(job.run_folder / METRICS_FILE, json.dumps(STEP).encode())
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until((job.run_folder / STOP_FILE).exists)

    FakeLauncher.use(monkeypatch, complete)
    job = new_job()

    with hold_lease(tmp_path / "command.lock") as held:
        supervise(job, held)

    assert not (job.run_folder / STOP_FILE).exists()


def test_a_restart_has_a_begin_of_its_own(
    tmp_path: Path, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second start's set-up time would include the first start's training."""
    lost_at: list[datetime] = []

    def lose_once(job: Job) -> None:
        if not lost_at:
            lost_at.append(datetime.now(UTC))
            raise WorkersLost("rank 1 was killed")

    jobs = FakeLauncher.use(monkeypatch, lose_once).jobs
    job = new_job()

    with hold_lease(tmp_path / "command.lock") as held:
        supervise(job, held)

    assert jobs[0].workers_started_at == job.workers_started_at
    assert jobs[1].workers_started_at >= lost_at[0]
    assert [each.start_number for each in jobs] == [0, 1]
    assert jobs[1].started_at == job.started_at  # of the command, which the time limit counts from


def test_restarts_are_counted_since_the_newest_checkpoint(
    tmp_path: Path, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count begins again with each checkpoint; without a checkpoint the command gives up after `max_restarts`."""
    job = new_job(train__max_restarts="2")
    progress = iter([1, 2, 3, 3, 3])  # steps of the newest checkpoint when the workers are lost

    def lose(job: Job) -> None:
        folder = job.checkpoint_address(next(progress)).path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").touch()
        raise WorkersLost("rank 1 was killed")

    launcher = FakeLauncher.use(monkeypatch, lose)

    message = r"workers were lost 3 times, train\.max_restarts is 2"
    with hold_lease(tmp_path / "command.lock") as held, pytest.raises(WorkersLost, match=message):
        supervise(job, held)

    assert len(launcher.jobs) == 5


def test_a_worker_whose_device_fails_says_so(new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, environment: WorkerEnvironment) -> None:
        raise RuntimeError("nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE")

    monkeypatch.setattr("services.trainer.supervise.train", fail)
    monkeypatch.setenv("TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    job = new_job()
    job.run_folder.mkdir(parents=True, exist_ok=True)

    with pytest.raises(HardwareFault, match=re.escape(socket.gethostname())):
        train_on_node(job, WorkerEnvironment(0, 1))


def test_the_start_and_the_command_share_one_reading_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, really_open, opened = write_recipe(tmp_path), os.open, []

    def note(path: str, *arguments: Any, **options: Any) -> int:
        opened.append(Path(path))
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", note)

    assert begin_and_run(["--recipe", str(recipe), "--root", str(tmp_path / "fsx"), "--dry-run"]) == 0
    assert opened.count(recipe) == 1
