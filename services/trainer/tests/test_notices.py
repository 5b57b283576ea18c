"""A run tells its operators of its end, of a loss that diverges, and of lost workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.errors import WorkersLost
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import WEBHOOK_VARIABLE
from services.common.testing.webhooks import Receiver, receiving
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.supervision.supervise import notifying_run, supervise
from services.trainer.tests.fake_launcher import FakeLauncher


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
    new_job: Callable[..., Job],
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
