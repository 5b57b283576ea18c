"""A webhook hears of a command's end. A receiver that fails stops no work, and its address is in no log."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from services.common import notices
from services.common.errors import ArtifactError, RecipeError
from services.common.notices import notifying, read_webhook
from services.common.recipe.schema import WEBHOOK_VARIABLE, Notify
from services.common.testing.webhooks import SECRET, Receiver, receiving


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(notices, "RETRIES", notices.RETRIES.new(backoff_factor=0.01))
    with receiving() as opened:
        monkeypatch.setenv(WEBHOOK_VARIABLE, opened.url)
        yield opened


def test_a_block_tells_what_it_posts_and_that_it_failed(receiver: Receiver) -> None:
    def work() -> None:
        with notifying(Notify(), "tokenizer small", "make demo") as post:
            post("workers_lost", "rank 3")
            raise ArtifactError("shard 7: wrong checksum")

    with pytest.raises(ArtifactError):
        work()

    assert receiver.conditions == ["workers_lost", "failed"]
    assert "exit code 3: shard 7" in receiver.texts[1]
    assert receiver.texts[1].endswith("next: `make demo`")
    assert WEBHOOK_VARIABLE not in os.environ, "workers would inherit it"


def test_a_recipe_chooses_its_conditions(receiver: Receiver) -> None:
    with notifying(Notify(conditions=("failed",)), "trainer small", "make demo") as post:
        post("done", "trained")

    assert receiver.conditions == []


@pytest.mark.parametrize(("statuses", "requests"), [([503, 429], 3), ([500] * 9, 4), ([400], 1), ([301], 1)])
def test_a_receiver_that_fails_is_tried_again_a_few_times(
    receiver: Receiver, statuses: list[int], requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses = statuses
    with notifying(Notify(), "trainer small", "make demo") as post:
        post("done", "trained")

    assert len(receiver.texts) == requests
    assert SECRET not in caplog.text


def test_work_ends_without_a_receiver(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(notices, "RETRIES", urllib3.Retry(total=0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/{SECRET}"
    monkeypatch.setenv(WEBHOOK_VARIABLE, address)
    with notifying(Notify(), "trainer small", "make demo") as post:
        post("done", "trained")

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert SECRET not in caplog.text


def test_an_address_comes_from_where_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "webhook").write_text("https://example.com/a\n", encoding="utf-8")
    monkeypatch.setenv("MY_WEBHOOK", "https://example.com/b")

    assert read_webhook(Notify(webhook=f"file:{tmp_path}/webhook")) == "https://example.com/a"
    assert read_webhook(Notify(webhook="env:MY_WEBHOOK")) == "https://example.com/b"
    assert read_webhook(Notify()) == ""
    with pytest.raises(RecipeError):
        read_webhook(Notify(webhook="env:NOT_SET"))
    with pytest.raises(RecipeError):
        read_webhook(Notify(webhook=f"file:{tmp_path}/nothing"))
