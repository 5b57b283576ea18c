"""A run tells its operators of its end, of a loss that diverges, and of lost workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.errors import WorkersLost
from services.common.recipe.schema import WEBHOOK_VARIABLE
from services.common.testing.webhooks import Receiver, receiving
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.supervision.supervise import notifying_run, supervise
from services.trainer.tests.builders import make_corpus, make_recipe, write_recipe
from services.trainer.tests.fake_launcher import FakeLauncher
from services.trainer.tests.runs import train_alone


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as opened:
        monkeypatch.setenv(WEBHOOK_VARIABLE, opened.url)
        yield opened


def test_a_run_tells_of_its_end(tmp_path: Path, receiver: Receiver, capfd: pytest.CaptureFixture[str]) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "fsx"
    make_corpus(root, make_recipe(tmp_path))

    exit_code, output = train_alone(capfd, recipe, root, "--train.max_steps=1")

    assert exit_code == 0, output
    assert receiver.conditions == ["done"]


def test_a_run_tells_of_trouble_that_it_meets(
    tmp_path: Path, receiver: Receiver, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet_trouble(job: Job) -> None:
        record_event(job, "straggler", step=9, rank=1)
        record_event(job, "rollbacks_exhausted", step=9, rollbacks=2)
        raise WorkersLost("rank 3 was lost")

    FakeLauncher.use(monkeypatch, meet_trouble)
    job = new_job(train__max_restarts="0")
    with (
        pytest.raises(WorkersLost),
        notifying_run(job, tmp_path / "recipe.toml") as observe,
    ):
        supervise(job, observe)

    assert receiver.conditions == ["diverged", "failed"]
    assert "step 9" in receiver.texts[0]
    assert "exit code 75" in receiver.texts[1]
