"""A run tells its operators about itself: once each, whatever happens to its commands, and with no harm to the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.artifacts.lease import hold_lease
from services.common.errors import NoRoomForWorkers, StorageError, WorkersLost
from services.common.notices import notifier as notifier_module
from services.common.notices.outbox import OUTBOX_FILE
from services.common.notices.variables import WEBHOOK_VARIABLE
from services.common.testing.webhooks import SECRET, Receiver, receiving
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.notices import notifying_run
from services.trainer.supervise import supervise
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.fake_launcher import FakeLauncher
from services.trainer.tests.runs import train_alone


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as opened:
        monkeypatch.setenv(WEBHOOK_VARIABLE, opened.url)
        yield opened


def hang(receiver: Receiver) -> None:
    receiver.is_over.wait()


def conditions_of(receiver: Receiver) -> list[str]:
    return [json.loads(key).split("/")[1] for key in receiver.keys]


def test_a_run_tells_of_its_begin_and_its_end_and_goes_on_without_a_receiver(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "fsx"
    make_corpus(root, make_recipe(tmp_path))

    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=1")
    assert exit_code == 0, output
    assert conditions_of(receiver) == ["started", "done"]
    assert "report.html" in receiver.bodies[1]["text"]

    monkeypatch.setattr(notifier_module, "SEND_SECONDS", 0.1)
    monkeypatch.setenv(WEBHOOK_VARIABLE, receiver.url)
    receiver.answer = lambda handler: hang(receiver)
    receiver.answer = lambda handler: hang(receiver)
    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=2")
    assert exit_code == 0, output
    assert "was not sent to the webhook" in output
    assert set(conditions_of(receiver)[2:]) == {"done"}  # of step 2
    for path in (file for file in root.rglob("*") if file.is_file()):
        assert SECRET.encode() not in path.read_bytes()


def test_each_condition_of_a_run_is_told_once_over_restarts_and_commands(
    tmp_path: Path, receiver: Receiver, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start of the workers meets the same spike, a stall of its own, and a failing checkpoint."""

    def meet_trouble(job: Job) -> None:
        record_event(job, "loss_spike", step=9, first_step=7, loss=8.5, limit=4.0)
        record_event(job, "straggler", step=9, rank=1)
        record_event(job, "nan", step=9, cause="hardware", ranks=[3], hosts=["node-b"])
        record_event(job, "rollbacks_exhausted", step=9, rollbacks=2)
        record_event(job, "watchdog", step=10, message="rank 3: step 10 has taken 900 s")
        record_event(job, "checkpoint_failed", step=8, error="Input/output error")
        raise WorkersLost("rank 3 was lost")

    FakeLauncher.use(monkeypatch, meet_trouble)
    job = new_job(train__max_restarts="1")
    for attempt in ("first", "second"):
        job = replace(job, attempt=attempt)
        monkeypatch.setenv(WEBHOOK_VARIABLE, receiver.url)
        with (
            hold_lease(tmp_path / "command.lock") as held,
            pytest.raises(WorkersLost),
            notifying_run(job, tmp_path / "recipe.toml", step=0) as notices,
        ):
            supervise(job, held, notices.observe)

    once = {"started": 1, "loss_spiked": 1, "node_set_aside": 1, "loss_diverged": 1}
    assert Counter(conditions_of(receiver)) == once | {"checkpoint_failing": 2, "ended": 2, "stalled": 4}
    assert len(set(receiver.keys)) == len(receiver.keys)
    sent = [line for line in (job.run_folder / OUTBOX_FILE).read_text().splitlines() if "sent" in json.loads(line)]
    assert len(sent) == len(receiver.keys)


@pytest.mark.parametrize(
    ("error", "conditions"),
    [
        (NoRoomForWorkers("no room for 2"), {"started", "no_capacity", "ended"}),
        (StorageError("/fsx: No space left on device"), {"started", "checkpoint_failing", "ended"}),
    ],
)
def test_the_end_of_a_command_says_what_its_error_means(
    tmp_path: Path, receiver: Receiver, new_job: Callable[..., Job], error: Exception, conditions: set[str]
) -> None:
    with pytest.raises(type(error)), notifying_run(new_job(), tmp_path / "recipe.toml", step=0):
        raise error

    assert set(conditions_of(receiver)) == conditions
    assert len(receiver.keys) == len(conditions)
