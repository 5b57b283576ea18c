"""A webhook gets each notice once, across restarts. A receiver that fails neither stops a run nor sees a secret."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from services.common.errors import RecipeError, StorageError, TryAgain
from services.common.notices import notifier as notifier_module
from services.common.notices import stage_notices as stage_module
from services.common.notices.channels import Channel, Webhook, open_channels
from services.common.notices.notice import Notice
from services.common.notices.notifier import Notifier
from services.common.notices.stage_notices import StageNotices, notifying
from services.common.notices.variables import RELAY, RELAY_VARIABLE, WEBHOOK_VARIABLE
from services.common.recipe.schema import Notify
from services.common.testing.recipes import load_small
from services.common.testing.waiting import wait_until
from services.common.testing.webhooks import SECRET, Receiver, receiving, say

STALLED = Notice("stalled", "stalled/1", "trainer small-0123abcd", "rank 3: step 12 takes 900 s", report="/fsx/r.html")
SPIKED = Notice("loss_spiked", "loss_spiked/7", "trainer small-0123abcd", "the loss is 9 at step 7")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    return tmp_path / "run/small/notices.jsonl"


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "_FIRST_RETRY_SECONDS", 0.02)


@pytest.fixture
def short_limits(quick_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "SEND_SECONDS", 0.2)


def send(outbox: Path, channels: list[Channel], *notices: Notice) -> None:
    """Raise notices as one command does, to its end."""
    opened = Notifier(outbox, channels)
    for notice in notices:
        opened.raise_notice(notice)
    opened.close()


def written(folder: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file())


def test_a_notice_is_sent_once_by_all_commands_of_a_run(receiver: Receiver, outbox: Path) -> None:
    for _ in range(3):
        send(outbox, [Webhook(receiver.url)], STALLED, SPIKED, STALLED)

    assert receiver.titles == ["trainer small-0123abcd: stalled", "trainer small-0123abcd: loss spiked"]
    [body, _] = receiver.bodies
    assert STALLED.text in body["text"]
    assert "report: /fsx/r.html" in body["text"]
    assert "docs/operations/runbooks/stall.md" in body["text"]
    assert [block["type"] for block in body["blocks"]] == ["section", "section"]


def test_a_command_that_is_killed_while_it_sends_errs_to_twice_and_never_to_not_at_all(
    receiver: Receiver, outbox: Path
) -> None:
    """The receiver has the notice, and nobody has recorded that: the next command repeats it, with the same key."""
    program = (
        "import sys, time\n"
        "from services.common.notices.channels import Webhook\n"
        "from services.common.notices.notice import Notice\n"
        "from services.common.notices.notifier import Notifier\n"
        "from pathlib import Path\n"
        "sender = Notifier(Path(sys.argv[1]), [Webhook(sys.argv[2])])\n"
        "sender.raise_notice(Notice('stalled', 'stalled/1', 'trainer small-0123abcd', 'late'))\n"
        "time.sleep(60)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program, outbox, receiver.url])
    receiver.answer = lambda handler: os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    receiver.answer = lambda handler: say(handler, 200)

    send(outbox, [Webhook(receiver.url)], STALLED)
    send(outbox, [Webhook(receiver.url)], STALLED)

    assert len(receiver.bodies) == 2
    assert len(set(receiver.keys)) == 1


def test_half_a_line_of_a_killed_command_spoils_no_other_notice(receiver: Receiver, outbox: Path) -> None:
    send(outbox, [Webhook(receiver.url)], STALLED)
    with outbox.open("ab") as file:
        file.write(b'{"raised": {"condition": "lo')

    for _ in range(2):
        send(outbox, [Webhook(receiver.url)], STALLED, SPIKED)

    assert len(receiver.bodies) == 2


class Trouble(NamedTuple):
    """A receiver that does not take a notice."""

    answer: Callable[[Receiver, BaseHTTPRequestHandler], None]
    url: Callable[[Receiver], str] = lambda receiver: receiver.url


def drip(receiver: Receiver, handler: BaseHTTPRequestHandler) -> None:
    """Answer one byte every few milliseconds, so that no read ever times out."""
    while not receiver.is_over.wait(0.01):
        handler.wfile.write(b"H")


def hang(receiver: Receiver, handler: BaseHTTPRequestHandler) -> None:
    receiver.is_over.wait()


TROUBLES = {
    "it answers 500": Trouble(lambda receiver, handler: say(handler, 500)),
    "its webhook was removed": Trouble(lambda receiver, handler: say(handler, 404)),
    "it never answers": Trouble(hang),
    "it answers byte by byte": Trouble(drip),
    "it closes the connection": Trouble(lambda receiver, handler: handler.connection.close()),
    "nobody listens": Trouble(lambda r, handler: None, lambda r: f"http://127.0.0.1:9/services/{SECRET}"),
    "its name is unknown": Trouble(lambda r, handler: None, lambda r: f"http://nowhere.invalid/services/{SECRET}"),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
@pytest.mark.usefixtures("short_limits")
def test_work_goes_on_without_a_receiver_and_the_next_command_sends_what_is_left(
    receiver: Receiver,
    outbox: Path,
    trouble: Trouble,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver.answer = lambda handler: trouble.answer(receiver, handler)
    send(outbox, [Webhook(trouble.url(receiver))], STALLED, SPIKED)
    assert "the next command sends them" not in caplog.text, "its end has waited for CLOSE_SECONDS"

    monkeypatch.setattr(notifier_module, "SEND_SECONDS", 60.0)
    with receiving() as repaired:  # requests that were given up may still reach the other one
        send(outbox, [Webhook(repaired.url)])

    assert repaired.titles == ["trainer small-0123abcd: stalled", "trainer small-0123abcd: loss spiked"]
    assert "stalled/1 was not sent to the webhook" in caplog.text
    assert "SECRET" not in caplog.text + written(outbox.parent)


@pytest.mark.usefixtures("quick_retries")
def test_a_receiver_that_recovers_gets_each_notice_while_the_command_still_runs(
    receiver: Receiver, outbox: Path
) -> None:
    receiver.answer = lambda handler: say(handler, 503 if len(receiver.bodies) < 4 else 200)
    opened = Notifier(outbox, [Webhook(receiver.url)])
    opened.raise_notice(STALLED)
    opened.raise_notice(SPIKED)

    wait_until(lambda: len(receiver.bodies) == 5)
    opened.close()

    assert receiver.titles[3:] == ["trainer small-0123abcd: stalled", "trainer small-0123abcd: loss spiked"]


@pytest.mark.usefixtures("short_limits")
def test_a_redirect_is_not_followed(receiver: Receiver, outbox: Path) -> None:
    with receiving() as other:
        for status in (301, 302, 303, 307, 308):
            receiver.answer = lambda handler, status=status: say(handler, status, Location=other.url)  # type: ignore[misc]
            send(outbox, [Webhook(receiver.url)], STALLED)
        assert receiver.bodies
        assert other.bodies == []


@pytest.mark.usefixtures("short_limits")
def test_a_lookup_that_hangs_keeps_neither_the_work_nor_a_thread_for_each_notice(
    outbox: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """getaddrinfo has no timeout."""
    lookups: list[str] = []

    def hang(host: str, *_: object, **__: object) -> None:
        lookups.append(host)
        receiver.is_over.wait()

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", hang)
        opened = Notifier(outbox, [Webhook(receiver.url)])
        opened.raise_notice(STALLED)
        wait_until(lambda: "earlier requests hang" in caplog.text)
        opened.close()

    assert len(lookups) == 4


def test_a_notice_that_is_refused_for_good_does_not_hold_up_the_others(receiver: Receiver, outbox: Path) -> None:
    receiver.answer = lambda handler: say(handler, 400 if len(receiver.bodies) == 1 else 200)
    for _ in range(2):
        send(outbox, [Webhook(receiver.url)], STALLED, SPIKED)

    assert len(receiver.bodies) == 2
    assert [line.get("refused") for line in map(json.loads, outbox.read_text().splitlines())].count("stalled/1") == 1


def test_a_notice_is_sent_where_its_outbox_cannot_be_written(receiver: Receiver, tmp_path: Path) -> None:
    """A full or read-only file system is a reason for a notice."""
    (tmp_path / "run").touch()

    send(tmp_path / "run/notices.jsonl", [Webhook(receiver.url)], STALLED, STALLED)

    assert len(receiver.bodies) == 1


def test_the_address_of_a_webhook_leaves_the_environment_and_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    url = f"https://hooks.example.org/{SECRET}"
    environment = {WEBHOOK_VARIABLE: url, "OTHER": url, "WRONG": f"{SECRET} is no address"}

    channels, problem = open_channels(Notify(), environment)
    assert ([each.name for each in channels], problem) == (["webhook"], "")
    assert WEBHOOK_VARIABLE not in environment
    assert SECRET not in repr(channels)

    (tmp_path / "url").write_text(f"{url}\n")
    for place in (f"file:{tmp_path / 'url'}", "env:OTHER"):
        assert len(open_channels(Notify(webhook=place), environment)[0]) == 1
    for place in ("env:WRONG", "env:OTHER", f"file:{tmp_path / 'none'}"):  # OTHER was taken out
        channels, problem = open_channels(Notify(webhook=place), environment)
        assert channels == []
        assert place.partition(":")[2] in problem
        assert SECRET not in problem

    with pytest.raises(RecipeError) as refused:
        load_small(tmp_path, {"notify.webhook": url})
    assert "notify.webhook" in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.fixture
def stage(tmp_path: Path, outbox: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> StageNotices:
    monkeypatch.setenv(WEBHOOK_VARIABLE, receiver.url)
    monkeypatch.setattr(stage_module, "LOOK_SECONDS", 0.01)
    return StageNotices(outbox, Notify(), subject="trainer small", root=tmp_path, next_command="again")


def test_an_end_is_told_with_its_code_and_what_to_do(stage: StageNotices, receiver: Receiver) -> None:
    with pytest.raises(StorageError), notifying(stage):
        raise StorageError("/fsx: No space left on device")

    [text] = [body["text"] for body in receiver.bodies]
    assert "exit code 5" in text
    assert "No space left" in text
    assert "next: again" in text
    assert "runbooks/file-system-full.md" in text


def test_a_file_system_that_fills_up_is_told_once_until_it_has_room_again(
    stage: StageNotices, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def at(percent: int) -> None:
        def look(path: Path) -> SimpleNamespace:
            looks.append(percent)
            return SimpleNamespace(used=10 * percent, free=1000 - 10 * percent)

        monkeypatch.setattr(shutil, "disk_usage", look)
        wait_until(lambda: looks[-3:] == [percent] * 3)

    for percent in (84, 86, 99, 83, 90, 79, 86):
        at(percent)
    stage.close()

    assert len(receiver.bodies) == 2
    assert all("86 %" in body["text"] for body in receiver.bodies)


def test_a_recipe_chooses_conditions_and_a_relayed_stage_only_writes(
    tmp_path: Path, outbox: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of a stage on Kubernetes reaches no receiver: the deploy Job sends what the outbox holds. It tells of the
    end itself.
    """
    monkeypatch.setenv(RELAY_VARIABLE, RELAY)
    notices = StageNotices(
        outbox, Notify(conditions=("ended", "stalled")), subject="trainer small", root=tmp_path, next_command="again"
    )
    notices.raise_notice("loss_spiked", "7", "the loss is 9")
    notices.raise_notice("stalled", "1", "step 12 takes 900 s")
    with pytest.raises(TryAgain), notifying(notices):
        raise TryAgain("a node was lost")
    assert receiver.bodies == []

    opened = Notifier(tmp_path / "deploy.jsonl", [Webhook(receiver.url)], relayed=lambda: [outbox])
    wait_until(lambda: receiver.bodies)
    opened.close()
    send(tmp_path / "deploy.jsonl", [Webhook(receiver.url)])

    assert receiver.titles == ["trainer small: stalled"]
    assert "next: make stage-status" in receiver.bodies[0]["text"]


def test_without_a_receiver_nothing_is_written(tmp_path: Path, outbox: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    notices = StageNotices(outbox, Notify(), subject="trainer small", root=tmp_path, next_command="again")
    with notifying(notices):
        notices.raise_notice("started", "", "training")

    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""
