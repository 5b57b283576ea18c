"""Records when the trainer's commands began, lived and ended, and what their nodes cost, in `commands.jsonl`.

Each command that trains a run has one line, which it keeps up to date in place: `seen_at` while it lives, and
`ended_at` and `exit_code` at its end. All lines have LINE_BYTES bytes, so a full disk does not keep a command from
recording its end. A command that was killed leaves the time at which it was last seen. The state and the cost of a run
are computed from these lines.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from services.common.hardware.instance_types import read_instance_types
from services.common.input.credentials import mask
from services.common.input.files import open_regular_file, read_file
from services.common.launch.launcher import INLINE
from services.common.process.background_thread import running_in_background
from services.common.process.entry_point import exit_code_for
from services.common.process.telemetry import parse_json_line
from services.common.recipe.schema import stage_nodes
from services.trainer.job import Job
from services.trainer.metrics.records import Count, Price, Timestamp

logger = logging.getLogger(__name__)

COMMANDS_FILE = "commands.jsonl"
LINE_BYTES = 1_024
SEEN_SECONDS = 10.0
"""Seconds between two updates of `seen_at`."""
LOST_SECONDS = 180.0
"""Seconds without an update after which a command on another node counts as lost. Its clock may differ by as much."""
_ERROR_CHARACTERS = 240


class CommandRecord(BaseModel):
    """A command that trained a run: its life, and the nodes that it held."""

    model_config = ConfigDict(frozen=True, strict=True)

    attempt: str
    """Unique name of the command: `Job.attempt`."""
    node: str
    pid: int
    began_at: Timestamp
    """Time at which the command began, in seconds since 1970, as are the other times."""
    seen_at: Timestamp
    """Newest time at which the command lived."""
    ended_at: Timestamp | None = None
    """Time of the command's end; None while it runs, and for a command that was killed."""
    exit_code: int | None = None
    error: str | None = None
    """Begin of the message of the error that ended the command."""
    nodes: Count
    workers: Count
    instance_type: str | None
    chips_per_node: Count | None
    """Accelerators of a node; None if the command computes on CPUs."""
    dollars_per_node_hour: Price | None
    """Approximate on-demand price of a node when the command began; None without an instance type."""
    price_source: str | None

    @property
    def held_seconds(self) -> float:
        """Seconds for which the command held its nodes: until its end, or until it was last seen."""
        return max(0.0, (self.ended_at or self.seen_at) - self.began_at)

    @property
    def node_hours(self) -> float:
        return self.nodes * self.held_seconds / 3_600

    def lives(self, now: float) -> bool:
        """Tell whether the command runs at the time `now`.

        It does if its line was updated within LOST_SECONDS, and a process of this node still exists.
        """
        if self.ended_at is not None or now - self.seen_at >= LOST_SECONDS:
            return False
        return self.node != socket.gethostname() or psutil.pid_exists(self.pid)


@contextmanager
def recording_command(job: Job) -> Iterator[None]:
    """Record this command's life during the block, and the exit code of the error that ends it.

    The caller holds the run's lock. A line that cannot be written is logged, and the run goes on.
    """
    line = _Line(job.run_folder / COMMANDS_FILE, _begin(job))
    exit_code, error = 0, None
    try:
        with running_in_background(line.keep_seen, "command-record"):
            yield
    except BaseException as raised:
        exit_code, error = exit_code_for(raised), mask(str(raised))[:_ERROR_CHARACTERS]
        raise
    finally:
        now = time.time()
        line.update(seen_at=now, ended_at=now, exit_code=exit_code, error=error)


def read_commands(run_folder: Path) -> list[CommandRecord]:
    """Return the records of the run's commands, oldest first, without lines that cannot be read."""
    try:
        content = read_file(run_folder / COMMANDS_FILE, run_folder)
    except OSError:
        return []
    return [record for line in content.split(b"\n") if (record := _parse(line))]


def sum_chip_hours(commands: Sequence[CommandRecord]) -> float | None:
    """Return the hours for which the commands held accelerators, times their number; None if one held none."""
    return _sum_by_node_hours(commands, [each.chips_per_node for each in commands])


def sum_cost(commands: Sequence[CommandRecord]) -> float | None:
    """Return the price in dollars of the nodes that the commands held; None if the price of one is unknown."""
    return _sum_by_node_hours(commands, [each.dollars_per_node_hour for each in commands])


def _sum_by_node_hours(commands: Sequence[CommandRecord], rates: Sequence[float | None]) -> float | None:
    """Return the sum of the commands' node-hours times their rates; None if one is unknown or there is no command."""
    known = [each.node_hours * rate for each, rate in zip(commands, rates, strict=True) if rate is not None]
    return math.fsum(known) if known and len(known) == len(commands) else None


class _Line:
    """The line of one command, which is overwritten in place."""

    def __init__(self, path: Path, record: CommandRecord) -> None:
        self._path, self._record, self._at = path, record, _end_of_lines(path)
        self._write()

    def update(self, **fields: float | str | None) -> None:
        self._record = self._record.model_copy(update=fields)
        self._write()

    def keep_seen(self, is_over: threading.Event) -> None:
        while not is_over.wait(SEEN_SECONDS):
            self.update(seen_at=time.time())

    def _write(self) -> None:
        fields = self._record.model_dump()
        line = json.dumps(fields).encode()
        if len(line) >= LINE_BYTES and self._record.error:  # JSON escapes characters that are not ASCII
            line = json.dumps(fields | {"error": ascii(self._record.error[: _ERROR_CHARACTERS // 8])}).encode()
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)  # a pipe would block
            try:
                os.pwrite(descriptor, line.ljust(LINE_BYTES - 1) + b"\n", self._at)
            finally:
                os.close(descriptor)  # a network file system shows it to others from here on
        except OSError as error:
            logger.warning("%s: the command's record could not be written: %s", self._path, error)


def _begin(job: Job) -> CommandRecord:
    recipe, now = job.recipe, time.time()
    name = recipe.cluster.trainer_instance_type
    node = read_instance_types()[name] if name else None
    is_one_node, workers = job.launch == INLINE, recipe.parallel.num_workers
    workers_per_node = workers if is_one_node else recipe.cluster.trainer_workers_per_node
    return CommandRecord(
        attempt=job.attempt,
        node=socket.gethostname(),
        pid=os.getpid(),
        began_at=job.started_at.timestamp(),
        seen_at=now,
        nodes=1 if is_one_node else stage_nodes(recipe, "trainer"),
        workers=workers,
        instance_type=name,
        chips_per_node=node.chips if node else workers_per_node if recipe.parallel.device == "cuda" else None,
        dollars_per_node_hour=node.dollars_per_hour if node else None,
        price_source=node.price_source if node else None,
    )


def _end_of_lines(path: Path) -> int:
    """Return the end of the last whole line: a killed command may have left a part of a line."""
    try:
        with open_regular_file(path) as file:
            return file.seek(0, os.SEEK_END) // LINE_BYTES * LINE_BYTES
    except OSError:
        return 0


def _parse(line: bytes) -> CommandRecord | None:
    found = parse_json_line(line.strip()) if line.strip() else None
    try:
        return CommandRecord.model_validate(found) if found else None
    except ValidationError:
        return None
