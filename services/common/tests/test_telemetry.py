"""Programs report their work: records, phases and logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.process.telemetry import (
    JsonLines,
    configure_logging,
    read_json_lines,
    read_last_json_line,
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
    assert read_json_lines(tmp_path / "logs" / "metrics.jsonl") == []
    lines = JsonLines(tmp_path / "logs" / "metrics.jsonl")
    records = [{"step": step, "note": "ü\n"} for step in range(3)]
    for record in records:
        lines.append(record)

    assert read_json_lines(tmp_path / "logs" / "metrics.jsonl") == records
    lines.close()


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 2}', b"\0\0\0"])
@pytest.mark.parametrize("before", [[], [{"step": 1}]])
def test_a_record_that_a_killed_writer_did_not_finish_is_cut_off(
    tmp_path: Path, before: list[dict[str, int]], torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in before) + torn)
    assert read_json_lines(path) == before
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
