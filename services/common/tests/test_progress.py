"""Programs report their work: progress as lines, metrics as records, and logs."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.common.launch.metrics_export import export_metrics
from services.common.process import progress as progress_display
from services.common.process.progress import (
    PROGRESS_SECONDS_VARIABLE,
    parse_progress_line,
    reporting_progress,
    show_progress,
)
from services.common.process.telemetry import (
    JsonLines,
    configure_logging,
    read_json_lines,
    read_last_json_line,
)


def test_without_a_terminal_progress_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "PLAIN_PROGRESS_SECONDS", 0.0)
    with show_progress("encode", 2_000, "bytes") as progress:
        progress.advance_to(500)
        progress.advance_to(1_000, "half")
        progress.advance_to(2_000)

    assert (
        capsys.readouterr().err
        == "encode: 500/2,000 bytes\nencode: 1,000/2,000 bytes, half, 0 s left\nencode: 2,000/2,000 bytes\n"
    )


SHOWN = """
import logging
from services.common.process.progress import show_progress
from services.common.process.telemetry import configure_logging
configure_logging("trainer")
with show_progress("training", 2, "steps") as progress:
    progress.advance_to(1, "loss 8.4")
    logging.getLogger("services.trainer").info("told")
"""


def test_on_a_terminal_a_line_of_the_log_stays_above_the_progress() -> None:
    terminal, side = os.openpty()
    with subprocess.Popen([sys.executable, "-c", SHOWN], env=os.environ | {"TERM": "xterm"}, stderr=side) as process:
        os.close(side)
        written = b""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(terminal, 65_536):
                written += part
        assert process.wait() == 0
    os.close(terminal)
    [before] = re.findall(r"([^\n]*)trainer I told", written.decode())
    erase = "\x1b[2K"
    assert erase in before
    assert re.fullmatch(r"[0-9:]{8} ", before.rpartition(erase)[2])


def test_after_a_restart_the_time_left_counts_from_the_new_attempt_s_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate excludes the two minutes of a restart, and the steps that are done twice."""
    now, restart = 0.0, None
    monkeypatch.setattr(progress_display, "PLAIN_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: now)
    # Step 510 of the lost attempt is seen until the new one has taken its first step. The second restart loses none.
    first = [(0.0, 500), (5.0, 510), (5.0, restart), (10.0, 510), (125.0, 501), (130.0, 511), (135.0, 521)]
    with show_progress("training", 1_000, "steps") as progress:
        for now, done in [*first, (135.0, restart), (250.0, 522), (255.0, 532)]:  # noqa: B007 - the clock reads it
            progress.start_again() if done is restart else progress.advance_to(done)

    seconds_left = [int(each) for each in re.findall(r"(\d+) s left", capsys.readouterr().err)]
    assert seconds_left == [245, 240, 234]


def test_a_hang_is_said_as_such_and_is_no_part_of_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a second each, a hang of an hour, and the same steps again."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with show_progress("training", 1_000, "steps") as progress:
        for _ in range(50):
            progress.wait()
            now += 1.0
        for second in range(100):
            progress.advance_to(second + 1)
            now += 1.0
        for _ in range(3_600):
            progress.advance_to(100)  # the last record that the run's metrics have
            now += 1.0
        for second in range(60):
            progress.advance_to(second + 101)
            now += 1.0

    printed = capsys.readouterr().err.replace(",", "")
    left = [int(each) for each in re.findall(r"(\d+) s left", printed)]
    assert left == sorted(left, reverse=True)
    assert (max(left), min(left)) == (989, 840)
    hung = [int(each) for each in re.findall(r"no steps for (\d+) s", printed)]
    assert (hung[0], hung[-1], len(hung)) == (61, 3_541, 59)


def test_a_scrape_shows_the_progress_of_the_stage_that_runs_and_the_space_of_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(url, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (each.rpartition(" ") for each in lines if each[0] != "#")}

    with export_metrics((), tmp_path / "not made yet", "inline", 0, "127.0.0.1"):
        url = capfd.readouterr().out.split()[-1]
        assert scrape() == {}
        with reporting_progress("tokenizer"), show_progress("encode", 1_000, "bytes") as progress:
            progress.advance_to(200)
            now = 10.0
            progress.advance_to(400)
            labels = '{phase="encode",stage="tokenizer",unit="bytes"}'
            found = scrape()
            size = found.pop('millrace_file_system_size_bytes{stage="tokenizer"}')
            assert 0 < found.pop('millrace_file_system_available_bytes{stage="tokenizer"}') <= size
            assert found == {
                f"millrace_stage_progress_{name}{labels}": value
                for name, value in {"done": 400, "total": 1_000, "per_second": 20, "seconds_left": 30}.items()
            }


@pytest.mark.parametrize(("seconds", "lines"), [(None, 1), ("1", 10), ("5", 2)])
def test_plain_lines_come_as_often_as_their_reader_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: str | None, lines: int
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    if seconds:
        monkeypatch.setenv(PROGRESS_SECONDS_VARIABLE, seconds)
    with show_progress("training", 1_000, "steps") as progress:
        for step in range(1, 1_001):
            now = step / 100
            progress.advance_to(step)
    records = [parse_progress_line("trainer", line) for line in capsys.readouterr().err.splitlines()]
    assert [(each.phase, each.total) for each in records if each] == [("training", 1_000)] * len(records)
    assert len(records) == lines


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("services")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 2}', b"\0\0\0"])
@pytest.mark.parametrize("before", [[], [{"step": 1}]])
def test_a_record_that_a_killed_writer_did_not_finish_is_cut_off(
    tmp_path: Path, before: list[dict[str, int]], torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in before) + torn)
    assert read_json_lines(path) == before
    assert read_json_lines(tmp_path / "absent.jsonl") == []
    lines = JsonLines(path)
    lines.append({"step": 2})
    lines.close()

    assert read_json_lines(path) == [*before, {"step": 2}]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[1]"])
def test_a_line_that_is_no_record_is_none_and_hides_no_other(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    assert read_json_lines(path) == [{"step": 1}, None, {"step": 2}]

    path.write_bytes(b'{"step": 1}\n' + damage + b"\n")
    assert read_last_json_line(path) is None


@pytest.mark.usefixtures("_logging_as_before")
@pytest.mark.parametrize(
    ("rank", "expected"), [(None, ["info", "warning"]), (0, ["info", "warning"]), (1, ["warning"])]
)
def test_ranks_other_than_0_report_warnings_alone(tmp_path: Path, rank: int | None, expected: list[str]) -> None:
    configure_logging("trainer", rank=rank, file=tmp_path / "log")
    logging.getLogger("services.trainer").info("info")
    logging.getLogger("services.trainer").warning("warning")
    logging.getLogger("third.party").info("chatter")

    lines = (tmp_path / "log").read_text().splitlines()

    assert [line.split()[-1] for line in lines] == expected
    assert rank is None or f"trainer rank={rank}" in lines[0]
