"""Programs report their work: progress as lines and in files of other programs, metrics as records, and logs."""

from __future__ import annotations

import json
import logging
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.artifacts.manifest import PhaseTimer
from services.common.launch.metrics_export import export_metrics
from services.common.process import progress as progress_display
from services.common.process.progress import (
    ALREADY_PUBLISHED,
    PROGRESS_FILE_VARIABLE,
    STARTING,
    ProgressRecord,
    current_progress,
    read_progress,
    report_published,
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


def test_another_program_reads_a_stage_s_progress_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "progress.json", 0.0
    monkeypatch.setenv(PROGRESS_FILE_VARIABLE, str(path))
    monkeypatch.setattr("time.monotonic", lambda: now)

    def read() -> ProgressRecord:
        record = read_progress(path)
        assert record
        assert record.stage == "tokenizer"
        assert record.time > 1e9
        return record

    assert read_progress(path) is None
    with reporting_progress("tokenizer"):
        assert read().phase == STARTING
        with PhaseTimer().phase("encode"):
            assert read().phase == "encode"
            with show_progress("encode documents", 1_000, "bytes") as progress:
                progress.advance_to(200)
                now = 10.0
                progress.advance_to(400, "2 files")
                measured = read()
        assert read().phase == STARTING
        report_published(tmp_path / "corpus", is_new=False)
    assert (measured.phase, measured.done, measured.total, measured.unit) == ("encode documents", 400, 1_000, "bytes")
    assert (measured.per_second, measured.seconds_left, measured.note) == (20, 30, "2 files")
    assert (read().phase, read().note) == (ALREADY_PUBLISHED, str(tmp_path / "corpus"))
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


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


def test_a_progress_file_is_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "progress.json", 0.0
    monkeypatch.setenv(PROGRESS_FILE_VARIABLE, str(path))
    monkeypatch.setattr("time.monotonic", lambda: now)
    versions = set()
    with reporting_progress("trainer"), show_progress("training", 1_000, "steps") as progress:
        for step in range(1_000):
            now += 0.01
            progress.advance_to(step)
            versions.add(path.stat().st_ino)
            current = current_progress()
            assert current
            assert current.done == step
    assert 2 <= len(versions) <= 11
    assert current_progress() is None


def test_a_progress_file_that_cannot_be_written_harms_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PROGRESS_FILE_VARIABLE, str(tmp_path / "absent" / "progress.json"))
    with reporting_progress("trainer"), show_progress("training", 10, "steps") as progress:
        progress.advance_to(1)
    assert [record.message.count("absent/progress.json") for record in caplog.records] == [1]


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
