"""Writes and reads the records of steps and attempts: JSON lines are the truth, TensorBoard is a view of them."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from services.common.errors import ArtifactError, MillraceError
from services.common.input.files import is_damage, open_regular_file, unreadable
from services.common.process.telemetry import (
    JsonLines,
    JsonLinesTail,
    parse_json_line,
    read_json_lines,
    read_last_json_line,
)
from services.trainer.metrics.metric_table import find_samples

METRICS_FILE = "metrics.jsonl"
HELD_FILE = "metrics.held.jsonl"
ATTEMPTS_FILE = "attempts.jsonl"
BLOCK_BYTES = 2**20

_MAX_NUMBER = 1e100
"""Largest number that a line may have. A float32 is at most 3.4e38, and a sum over all lines of a run stays finite."""


def _require_sane(value: float) -> float:
    if math.isfinite(value) and abs(value) > _MAX_NUMBER:
        raise ValueError(f"{value} is larger than anything that a step measures")
    return value


Number = Annotated[float, AfterValidator(_require_sane)]
"""A loss or a norm, which may be NaN or infinite if the step was skipped."""
FiniteNumber = Annotated[FiniteFloat, AfterValidator(_require_sane)]
# A century: a date and so many seconds are a date again.
Seconds = Annotated[FiniteFloat, Field(ge=0, le=3.2e9)]
# No clock has shorter ticks, and numbers are divided by these seconds.
StepSeconds = Annotated[Seconds, Field(ge=1e-9)]
# From 1970 to 2100, so that a date can be made of it.
Timestamp = Annotated[FiniteFloat, Field(ge=0, le=4_102_444_800)]
Count = Annotated[int, Field(ge=0, le=2**53)]
# Dollars of an hour of a node.
Price = Annotated[FiniteFloat, Field(ge=0, le=1e6)]
# A scraper of Prometheus' format ends at a NUL.
LabelValue = Annotated[str, Field(min_length=1, max_length=10_000, pattern=r"^[^\x00]*$")]
LabelledNumbers = dict[LabelValue, Number]
"""Numbers of a metric by the values of its label."""


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one step that the loop knows; the loss is in nats per token, the gradient norm is before clipping."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    data_seconds: float
    skipped_steps: int
    is_first_of_process: bool
    """Whether the step loaded or compiled the graphs of its process."""
    time: float
    """Seconds since 1970 at which the step ended. Its record may be written one step later."""


class Line(BaseModel):
    """Fields of a line that readers use; a line may have more. The loss of a skipped step may be NaN."""

    model_config = ConfigDict(strict=True)


class _StepLine(Line):
    """Fields of a step's line, including all METRICS."""

    step: Count
    loss: Number
    gradient_norm: Number
    learning_rate: FiniteNumber
    step_seconds: StepSeconds
    data_seconds: Seconds
    skipped_steps: Count
    is_first_of_process: bool
    time: Timestamp
    step_tokens: Count
    tokens_per_second: FiniteNumber
    data_share: FiniteNumber
    goodput: FiniteNumber
    restarts: Count
    tokens: Count = 0
    mean_tokens_per_second: FiniteNumber = 0.0
    validation_loss: Number = 0.0
    validation_loss_standard_error: Number = 0.0
    validation_loss_by_source: LabelledNumbers = {}
    validation_perplexity: float = 0.0
    validation_bits_per_byte: Number = 0.0
    validation_tokens: Count = 0
    evaluation_seconds: Seconds = 0.0
    loss_max: Number = 0.0
    gradient_seconds_spread: Number = 0.0
    slowest_rank: Number = 0.0
    straggler_score: Number = 0.0
    graphs_compiled: Number = 0.0
    peak_rss_bytes: Number = 0.0
    peak_device_bytes: Number = 0.0
    checkpoint_stall_seconds: Seconds = 0.0
    mfu: FiniteNumber = 0.0
    mfu_causal: FiniteNumber = 0.0
    gradient_norm_by_group: LabelledNumbers = {}
    update_ratio_by_group: LabelledNumbers = {}
    clipped_share: FiniteNumber = 0.0
    largest_logit: Number = 0.0
    activation_rms: Number = 0.0
    productive_seconds: Seconds = 0.0
    redone_seconds: Seconds = 0.0
    restart_seconds: Seconds = 0.0
    run_started_at: Timestamp = 0.0


class _AttemptLine(Line):
    started_at: Timestamp
    setup_seconds: Seconds
    train_seconds: Seconds
    graphs_compiled: Count
    new_cache_files: Count
    slowest_checkpoint_seconds: Seconds = 0.0


@dataclass(frozen=True)
class ParsedLines:
    """Lines of a file of JSON lines, and the number of lines that could not be read."""

    lines: list[dict[str, Any]]
    unreadable: int


class MetricsWriter:
    """Appends to `metrics.jsonl` and `tensorboard/` of a run.

    Raises `OSError` when the JSON lines cannot be written; TensorBoard's events are left out while they cannot.
    """

    def __init__(self, run_folder: Path, first_step: int) -> None:
        self._run_folder = run_folder
        self._lines = JsonLines(run_folder / METRICS_FILE)
        # Imported here, because it imports torch, which those that read records do without.
        from services.trainer.metrics.tensorboard import TensorBoard  # noqa: PLC0415

        self._board = TensorBoard(run_folder / "tensorboard")
        self.is_holding = False
        """Whether a record is held."""
        self._take_held(first_step)

    def hold(self, record: Mapping[str, Any]) -> None:
        """Keep a record whose step may be committed before `log`, so that a kill does not lose the record."""
        partial = self._held.with_suffix(".partial")
        partial.unlink(missing_ok=True)  # a killed process may have left it
        with partial.open("x", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        partial.replace(self._held)
        self.is_holding = True

    def log(self, record: dict[str, Any]) -> None:
        """Write the record of one step. Raises `OSError` if the line cannot be written."""
        self._lines.append(record)
        if self.is_holding:
            self._held.unlink()
            self.is_holding = False
        self.show(record["step"], record)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Write metrics of a step to TensorBoard alone."""
        self._board.add(step, {name: value for name, value in known_metrics(values).items() if name != "step"})

    def log_attempt(self, record: dict[str, Any]) -> None:
        """Write how one start of the workers ended, with its compile misses. A killed start leaves no record."""
        attempts = JsonLines(self._run_folder / ATTEMPTS_FILE)
        attempts.append(record)
        attempts.close()

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    @property
    def _held(self) -> Path:
        return self._run_folder / HELD_FILE

    def _take_held(self, first_step: int) -> None:
        """Write the record that a killed process held, unless its step was written or will be done again."""
        held, last = read_last_json_line(self._held), read_last_step(self._run_folder)
        written = last["step"] if last else 0
        if held and _is_readable(held, _StepLine) and written < held["step"] <= first_step:
            self._lines.append(held)
        self._held.unlink(missing_ok=True)


def read_metrics(run_folder: Path) -> ParsedLines:
    """Return one record per step, in order, of the steps that led to the newest one.

    After a crash or a loss spike the run does steps again: earlier records of these and of later steps are dropped.
    """
    found, kept = read_lines(run_folder / METRICS_FILE, _StepLine), list[dict[str, Any]]()
    for record in found.lines:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return ParsedLines(kept, found.unreadable)


def read_attempts(run_folder: Path) -> ParsedLines:
    return read_lines(run_folder / ATTEMPTS_FILE, _AttemptLine)


def read_last_step(run_folder: Path) -> dict[str, Any] | None:
    """Return the newest record of a run; None if there is none or it cannot be read."""
    return read_last_line(run_folder / METRICS_FILE, _StepLine)


def read_record_of(run_folder: Path, step: int) -> dict[str, Any] | None:
    """Return the newest record of `step`, or of the last step before it that has one; None if there is none.

    This reads the file from its end, because a run of months has millions of lines.
    """
    try:
        with open_regular_file(run_folder / METRICS_FILE) as file:
            records = (_parse_step(line) for line in _lines_newest_first(file))
            return next((record for record in records if record and record["step"] <= step), None)
    except OSError:
        return None


class StepsNewestFirst:
    """Iterates over the records of `read_metrics`, newest first, in memory that does not grow with their number.

    Raises `ArtifactError` if something else than a file is in the file's place.
    """

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / METRICS_FILE
        self.unreadable = 0
        """Number of lines that could not be read, of those that the newest iteration has passed."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.unreadable, done_again = 0, math.inf  # steps from here on were done again later
        try:
            with open_regular_file(self._path) as file:
                for line in _lines_newest_first(file):
                    record = _parse_step(line)
                    if record is None:
                        self.unreadable += 1
                    elif record["step"] < done_again:
                        done_again = record["step"]
                        yield record
        except FileNotFoundError:
            return
        except OSError as error:
            raise _explain(self._path, error) from error


class MetricsTail:
    """Reads records as they are appended to a run's metrics, beginning now."""

    def __init__(self, run_folder: Path) -> None:
        self._tail = JsonLinesTail(run_folder / METRICS_FILE, from_end=True)

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last call; empty while the file cannot be read."""
        return [record for record in self._tail.read() if _is_readable(record, _StepLine)]


def known_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of METRICS that a record has, by `Sample.name` and in the order of METRICS."""
    return {sample.name: sample.value for sample in find_samples(record)}


def read_lines(path: Path, kind: type[Line]) -> ParsedLines:
    """Read lines of one kind. Raises `ArtifactError` if `path` is not a regular file."""
    try:
        lines = read_json_lines(path)
    except OSError as error:
        raise _explain(path, error) from error
    readable = [line for line in lines if line is not None and _is_readable(line, kind)]
    return ParsedLines(readable, len(lines) - len(readable))


def read_last_line(path: Path, kind: type[Line]) -> dict[str, Any] | None:
    """Return the newest line of one kind without reading the others; None if there is none or it cannot be read."""
    record = read_last_json_line(path)
    return record if record and _is_readable(record, kind) else None


def _explain(path: Path, error: OSError) -> MillraceError:
    explained = unreadable(path, error)
    if not is_damage(explained):
        return explained
    return ArtifactError(f"{explained} It holds no training state. Move it away: `mv {path} {path}.aside`.")


def _lines_newest_first(file: io.FileIO) -> Iterator[bytes]:
    """Yield the complete lines of a file from its end, in blocks: a run of months has millions of lines.

    A line of more than BLOCK_BYTES, which no writer makes, is cut and so cannot be parsed.
    """
    position, rest, is_torn = file.seek(0, os.SEEK_END), b"", True  # a killed writer did not finish the last line
    while position:
        start = max(0, position - BLOCK_BYTES)
        file.seek(start)
        rest, *lines = (file.read(position - start) + rest).split(b"\n")
        position, rest = start, rest[:BLOCK_BYTES]
        for line in reversed(lines):
            if not is_torn:
                yield line
            is_torn = False
    if not is_torn:
        yield rest


def _parse_step(line: bytes) -> dict[str, Any] | None:
    record = parse_json_line(line)
    return record if record is not None and _is_readable(record, _StepLine) else None


def _is_readable(record: dict[str, Any], kind: type[Line]) -> bool:
    try:
        kind.model_validate(record)
    except ValidationError:
        return False
    return True
