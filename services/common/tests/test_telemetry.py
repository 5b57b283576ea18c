"""What programs say while they work."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich.console

from services.common.artifacts.phase_timer import PhaseTimer
from services.common.process import telemetry
from services.common.process.telemetry import (
    JsonLines,
    configure_logging,
    read_json_lines,
    read_last_json_line,
    show_progress,
)


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("services")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_records_are_read_as_they_were_appended(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "logs" / "metrics.jsonl")
    records = [{"step": step, "note": "ü\n"} for step in range(3)]
    for record in records:
        lines.append(record)

    assert read_json_lines(tmp_path / "logs" / "metrics.jsonl") == records
    lines.close()


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("torn", [b"{", b'{"step": 2}', b"\0\0\0"])
def test_a_record_that_a_killed_writer_did_not_finish_is_not_read(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)

    assert read_json_lines(path) == [{"step": 1}]


@pytest.mark.parametrize("before", [b"", b"{", b'{"step": 1}\n', b'{"step": 1}\n{"st'])
def test_the_next_writer_continues_after_the_last_whole_record(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    lines = JsonLines(path)
    lines.append({"step": 2})
    lines.close()

    assert read_json_lines(path) == ([{"step": 1}] if b"\n" in before else []) + [{"step": 2}]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[1]", b"7", b"null", b"[" * 100_000])
def test_a_line_that_is_no_record_is_none_and_hides_no_other(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    assert read_json_lines(path) == [{"step": 1}, None, {"step": 2}]

    path.write_bytes(b'{"step": 1}\n' + damage + b"\n")
    assert read_last_json_line(path) is None


def test_without_a_terminal_progress_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "PLAIN_PROGRESS_SECONDS", 0.0)
    with show_progress("encode", 2_000, "bytes") as progress:
        progress.advance_to(500)
        progress.advance_to(1_000, "half")
        progress.advance_to(2_000)

    assert (
        capsys.readouterr().err
        == "encode: 500/2,000 bytes\nencode: 1,000/2,000 bytes, half, 0 s left\nencode: 2,000/2,000 bytes\n"
    )


def test_after_a_restart_the_time_left_counts_from_the_new_attempt_s_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two minutes of starting workers again are no part of the rate, nor are the steps that are done twice."""
    now = 0.0
    monkeypatch.setattr(telemetry, "PLAIN_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: now)
    with show_progress("training", 1_000, "steps") as progress:
        progress.advance_to(500)
        now = 5.0
        progress.advance_to(510)
        progress.start_again()
        now = 10.0
        progress.advance_to(510)  # the last step of the lost attempt is seen until the new one has taken its first
        now = 125.0
        progress.advance_to(501)
        now = 130.0
        progress.advance_to(511)
        progress.start_again()
        progress.advance_to(511)
        now = 250.0
        progress.advance_to(512)  # none was lost: it goes on where it stopped
        now = 255.0
        progress.advance_to(522)

    said = [line.rpartition(", ")[2] for line in capsys.readouterr().err.splitlines()]
    none = "training: {}/1,000 steps".format
    assert said == [
        none(500),
        "245 s left",
        none(510),
        none(501),
        "244 s left",
        none(511),
        none(512),
        "239 s left",
    ]


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

    said = [line.rpartition(", ")[2] for line in capsys.readouterr().err.splitlines()]
    left = [int(text.removesuffix(" s left").replace(",", "")) for text in said if text.endswith(" s left")]
    assert left == sorted(left, reverse=True)
    assert (max(left), min(left)) == (989, 840)
    hung = [text for text in said if text.startswith("no steps for ")]
    assert (hung[0], hung[-1], len(hung)) == ("no steps for 61 s", "no steps for 3,541 s", 59)


def test_a_terminal_s_bar_says_a_hang_too(monkeypatch: pytest.MonkeyPatch) -> None:
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    monkeypatch.setattr(telemetry, "NO_PROGRESS_SECONDS", 0.0)
    with show_progress("training", 100, "steps") as progress:
        progress.advance_to(1)

    assert isinstance(console.file, io.StringIO)
    assert re.search(r"1/100 steps.* no steps for 0 s", console.file.getvalue())


def test_slow_pieces_are_no_hang_before_several_of_them_would_have_been_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with show_progress("training", 100, "steps") as progress:
        for second in range(3_000):
            progress.advance_to(second // 100)
            now += 1.0
        for _ in range(600):
            progress.advance_to(29)
            now += 1.0

    said = [line.rpartition(", ")[2] for line in capsys.readouterr().err.splitlines()]
    hung = [text for text in said if text.startswith("no steps for ")]
    assert hung[:2] == ["no steps for 60 s", "no steps for 500 s"]  # of the first one nobody knows how long it takes
    assert "7,100 s left" in said


def test_a_start_that_hangs_is_said_before_its_first_piece(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with show_progress("training", 100, "steps") as progress:
        for _ in range(125):
            progress.wait()
            now += 1.0

    assert capsys.readouterr().err.splitlines()[:2] == [
        "training: 0/100 steps, no steps for 60 s",
        "training: 0/100 steps, no steps for 120 s",
    ]


def test_frequent_progress_is_one_line_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "PLAIN_PROGRESS_SECONDS", 1e9)
    with show_progress("encode", 100, "bytes") as progress:
        for done in range(101):
            progress.advance_to(done)

    assert capsys.readouterr().err == "encode: 100/100 bytes\n"


def test_a_phase_timer_keeps_phases_in_order() -> None:
    phase_timer = PhaseTimer()
    with phase_timer.phase("plan"):
        pass
    with phase_timer.phase("encode"):
        pass

    assert [phase.name for phase in phase_timer.phases] == ["plan", "encode"]


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
